"""Training on several ranks, for tests: a small model, its data by rank, and what came out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import tiermem

WIDTH = 64


@dataclass(frozen=True)
class Trained:
    """Losses of this rank by step, and the whole parameters and states after the last (numpy, which
    processes can send each other)."""

    losses: list[float]
    params: dict[str, np.ndarray]
    states: dict[str, np.ndarray]
    norms: list[float]
    exchanged: dict[str, tuple[int, int, int]]  # by kind: exchanges, bytes sent, bytes received


def build(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(WIDTH, 96),
        nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(4)]),
        nn.LayerNorm(96),
        nn.Linear(96, 31, bias=False),
    )
    return model.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator).to(dtype)


def train(
    rank: int,
    size: int,
    config: dict[str, Any],
    steps: int = 3,
    micro_steps: int = 1,
    clip: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Trained:
    """Trains `build` on this rank's batches."""
    torch.set_num_threads(1)
    model = build(dtype)
    losses, norms = [], []
    with tiermem.Runtime(config) as runtime:
        tiermem.shard(model, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            total = 0.0
            for micro in range(micro_steps):
                x = batch(rank, step * micro_steps + micro, dtype)
                loss = model(x).float().square().mean() / micro_steps
                loss.backward()
                total += loss.item()
            losses.append(total)
            if clip is not None:
                norms.append(optimizer.clip_grad_norm_(clip).item())
            optimizer.step()
            optimizer.zero_grad()
        params = {name: tiermem.full_master(p).numpy() for name, p in model.named_parameters()}
        states = {}
        for name, p in model.named_parameters():
            for key, value in optimizer.state[p].items():
                if key != "master":
                    states[f"{name}.{key}"] = value.numpy()
        exchanged = {
            kind.name: (traffic.exchanges, traffic.sent_bytes, traffic.received_bytes)
            for comm in runtime.communicators
            for kind, traffic in comm.stats().by_kind.items()
        }
    return Trained(losses, params, states, norms, exchanged)


def assert_same(first: Trained, second: Trained) -> None:
    assert first.losses == second.losses
    assert first.norms == second.norms
    assert first.params.keys() == second.params.keys()
    for name, value in first.params.items():
        assert np.array_equal(value, second.params[name]), name
    for name, value in first.states.items():
        assert np.array_equal(value, second.states[name]), name


def clipped_in_one_process(
    model: nn.Module, loss_at: Callable[[nn.Module, int], torch.Tensor], clip: float, steps: int
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Plain torch on a whole model: parameters after ``steps``, and the norms that were clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(steps):
        loss_at(model, step).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().numpy() for n, p in model.named_parameters()}, norms


def digest(params: Iterable[torch.Tensor]) -> str:
    """Of the masters of sharded ``params``. All ranks call it."""
    result = hashlib.sha256()
    for param in params:
        result.update(tiermem.full_master(param).numpy().tobytes())
    return result.hexdigest()
