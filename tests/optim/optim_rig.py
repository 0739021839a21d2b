"""A small network and its twin in plain PyTorch, stepped alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import tiermem

WIDTH = 64


class Net(nn.Module):
    """Two linear layers, an optional branch; sizes are multiples of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        return self.branch(y) if branch else y


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int, **options: Any) -> torch.Tensor:
    x = inputs(step).to(next(model.parameters()).dtype)
    result: torch.Tensor = model(x, **options).float().square().mean()
    return result


def take_step(model: nn.Module, optimizer: Any, step: int, **options: Any) -> float:
    loss = loss_of(model, step, **options)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


PLACEMENTS = ("host", "nvme", "device")


@contextmanager
def sharded(
    base: Any, placement: str = "host", **changes: Any
) -> Iterator[tuple[tiermem.Runtime, nn.Module]]:
    """`Net` sharded with everything in ``placement``, below ``base`` where that is nvme."""
    config = {
        "params": placement,
        "optimizer": placement,
        "device": "cpu",
        "host_memory": 16 << 20,
        "paths": [str(base)] if placement == "nvme" else [],
        "persistence_threshold_numel": 300,
        "resident_memory": 0,
        "pin_memory": False,
        **changes,
    }
    with tiermem.Runtime(config) as runtime:
        yield runtime, tiermem.shard(make_net(), runtime)


def assert_equal_to(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        assert torch.equal(tiermem.full_param(param), expected[name].detach()), name
