"""A small network, its data, and the plain loop that an engine has to agree with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import tiermem

WIDTH = 64
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 300,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def config(**changes: Any) -> dict[str, Any]:
    """`BASE` with top-level keys replaced; None removes one."""
    merged = {**BASE, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Sizes are multiples of 64, so that torch's fused updates take their vector path."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Tanh(),
        nn.Linear(2 * WIDTH, 2 * WIDTH),
        nn.Linear(2 * WIDTH, 64),
    ).to(dtype)


def batch(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)


def loss_of(model: Any, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number, dtype)).float().square().mean()
    return loss


@contextmanager
def engine_of(settings: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Iterator[Any]:
    model = make_net() if model is None else model
    engine, *_ = tiermem.initialize(model=model, config=settings, **more)
    with engine:
        yield engine


def micro_step(engine: Any, number: int, dtype: torch.dtype = torch.float32) -> float:
    loss = loss_of(engine, number, dtype)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: list[int],
    schedule: Any = None,
    before: Callable[[], None] = lambda: None,
) -> list[float]:
    """One step of several micro-steps as people write it; the losses."""
    losses = []
    for number in numbers:
        loss = loss_of(model, number)
        (loss / len(numbers)).backward()
        losses.append(float(loss.detach()))
    before()
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()
    return losses


def assert_equal_to(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        assert torch.equal(tiermem.full_param(param), expected[name].detach()), name
