"""A sharded model beside its plain twin, trained in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import SMALL, VOCABULARY, loss_of

import tiermem

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    """The hardest configuration: everything on NVMe, nothing kept, released memory poisoned, room
    for one unit at a time."""
    base: dict[str, Any] = {
        "device": "cpu",
        "params": "nvme",
        "optimizer": "nvme",
        "paths": [path],
        "host_memory": "16MiB",
        "resident_memory": 0,
        "persistence_threshold_numel": SMALL,
        "prefetch_bytes": 0,
        "poison_released": True,
    }
    return base | changes


def batch(seed: int) -> torch.Tensor:
    """Tokens (4, 8)."""
    return torch.randint(0, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(seed))


@dataclass
class Twins:
    """``plain`` and ``model`` start equal; every method does the same to both."""

    plain: nn.Module
    model: nn.Module
    runtime: tiermem.Runtime
    plain_optimizer: torch.optim.Optimizer
    optimizer: tiermem.optim.AdamW
    loss: Loss = loss_of
    losses: list[tuple[float, float]] = field(default_factory=list)

    @property
    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], ...]:
        return (self.plain, self.plain_optimizer), (self.model, self.optimizer)

    def step(self, seed: int = 0, loss: Loss | None = None) -> None:
        """One training step on each."""
        values = []
        for model, optimizer in self.both:
            torch.manual_seed(1000 + seed)
            value = (loss or self.loss)(model, batch(seed))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(value.item())
        self.losses.append((values[0], values[1]))

    def steps(self, count: int, first: int = 0) -> None:
        for seed in range(first, first + count):
            self.step(seed)

    def check(self, *, states: bool = True, inexact: tuple[str, ...] = ()) -> None:
        """Losses, parameters, buffers and optimizer states agree to the bit."""
        plain, sharded_losses = zip(*self.losses, strict=True) if self.losses else ((), ())
        if inexact:
            assert sharded_losses == pytest.approx(plain, rel=1e-6)
        else:
            assert sharded_losses == plain
        wrong = different(self.plain, self.model)
        assert [name for name in wrong if name not in inexact] == []
        sharded = dict(self.model.named_parameters())
        for name, param in self.plain.named_parameters():
            if name in inexact:
                torch.testing.assert_close(tiermem.full_param(sharded[name]), param.detach())
            elif states:
                self._check_state(name, param, sharded[name])
        for (name, a), b in zip(self.plain.named_buffers(), self.model.buffers(), strict=True):
            assert torch.equal(a, b), name

    def _check_state(self, name: str, plain: torch.Tensor, sharded: torch.Tensor) -> None:
        expected = self.plain_optimizer.state.get(plain)
        found = self.optimizer.state.get(sharded)
        assert bool(expected) == bool(found), f"{name} has a state in one optimizer only"
        if expected and found:
            assert int(expected["step"]) == int(found["step"]), name
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(expected[key], found[key]), f"{key} of {name}"


def different(plain: nn.Module, model: nn.Module) -> list[str]:
    """Names of parameters whose values differ."""
    sharded = dict(model.named_parameters(remove_duplicate=False))
    return [
        name
        for name, param in plain.named_parameters()
        if not torch.equal(param.detach(), tiermem.full_param(sharded[name]))
    ]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters of a sharded model."""
    return {name: tiermem.full_param(param) for name, param in model.named_parameters()}
