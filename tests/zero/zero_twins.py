"""A sharded model beside its plain twin, trained in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import SMALL, VOCABULARY, loss_of

import tiermem
from tiermem.models.reference import round_ties_away

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


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` over fp32 masters of the bf16 parameters, and over fp32 ones
    themselves. Masters begin as the parameters are, and are rounded back as a split master rounds."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        self._params = list(params)
        self._masters = {p: p.detach().float() for p in self._params if p.dtype == torch.bfloat16}
        super().__init__([self._masters.get(p, p) for p in self._params], fused=True, **options)

    def master_of(self, param: torch.Tensor) -> torch.Tensor:
        return self._masters.get(param, param)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param, master in self._masters.items():
            master.grad = None if param.grad is None else param.grad.float()
        super().step()
        for param, master in self._masters.items():
            if master.grad is not None:
                param.copy_(round_ties_away(master))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for param in self._params:
            param.grad = None


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
        optimizer = self.plain_optimizer
        master = optimizer.master_of(plain) if isinstance(optimizer, MasterAdamW) else plain
        expected = optimizer.state.get(master)
        found = self.optimizer.state.get(sharded)
        assert bool(expected) == bool(found), f"{name} has a state in one optimizer only"
        if expected and found:
            assert int(expected["step"]) == int(found["step"]), name
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(expected[key], found[key]), f"{key} of {name}"
            if master is not plain:
                assert torch.equal(tiermem.full_master(sharded), master), f"master of {name}"


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
