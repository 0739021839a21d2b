"""Training on several ranks with every option that may change a number."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numerics_rig import WIDTH, make_net

import tiermem

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Job:
    """One training run. ``bad`` is the rank and the step whose loss overflows in fp16."""

    config: dict[str, Any]
    dtype: str = "bf16"
    steps: int = 3
    micro_steps: int = 1
    rows: int = 4
    clip: float | None = None
    no_sync: bool = False
    bad: tuple[int, int] | None = None


@dataclass(frozen=True)
class Result:
    """What came out on one rank (numpy, which processes can send each other)."""

    losses: list[float] = field(default_factory=list)
    norms: list[tuple[float | None, float | None]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    unchanged: list[bool] = field(default_factory=list)  # by step: no value changed in it
    values: dict[str, np.ndarray] = field(default_factory=dict)
    exchanged: dict[str, tuple[int, int]] = field(default_factory=dict)  # exchanges, bytes sent


def data(rank: int, step: int, job: Job) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100_000 * job.rows + 100 * step + rank)
    return torch.randn(job.rows, WIDTH, generator=generator).to(DTYPES[job.dtype])


def values_of(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    result = {}
    for name, p in model.named_parameters():
        result[name] = tiermem.full_master(p).numpy()
        for key, value in optimizer.state.get(p, {}).items():
            result[f"{name}.{key}"] = value.numpy()
    return result


def train(rank: int, job: Job) -> Result:
    torch.set_num_threads(1)
    result = Result()
    with tiermem.Runtime({"host_memory": "64MiB", "device": "cpu", **job.config}) as runtime:
        model = tiermem.shard(make_net().to(DTYPES[job.dtype]), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(job.steps):
            before = values_of(model, optimizer) if job.bad else {}
            for micro in range(job.micro_steps):
                waits = job.no_sync and micro + 1 < job.micro_steps
                with tiermem.no_sync(model) if waits else contextlib.nullcontext():
                    x = data(rank, step * job.micro_steps + micro, job)
                    x = x.to(DTYPES[job.config.get("compute_dtype", job.dtype)])
                    loss = model(x).float().square().mean() / job.micro_steps
                    result.losses.append(loss.item())
                    bad = 1e6 if job.bad == (rank, step) else 1.0
                    optimizer.scale(loss * bad).backward()
            if job.clip is not None:
                optimizer.clip_grad_norm_(job.clip)
            optimizer.step()
            optimizer.zero_grad()
            result.norms.append((optimizer.last_grad_norm, optimizer.last_clipped_norm))
            result.scales.append(optimizer.loss_scale)
            result.skipped.append(optimizer.overflow)
            after = values_of(model, optimizer) if job.bad else {}
            result.unchanged.append(same_values(before, after))
        result.values.update(values_of(model, optimizer))
        runtime.drain()
        for comm in runtime.communicators:
            for kind, traffic in comm.stats().by_kind.items():
                result.exchanged[kind.name] = (traffic.exchanges, traffic.sent_bytes)
    return result


def train_all(rank: int, size: int, jobs: list[Job]) -> list[Result]:
    return [train(rank, job) for job in jobs]


def same_values(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(value, second[name]) for name, value in first.items()
    )


def assert_same(first: Result, second: Result, what: object) -> None:
    """Everything but what was exchanged."""
    for name in ("losses", "norms", "scales", "skipped", "unchanged"):
        np.testing.assert_array_equal(
            np.array(getattr(first, name), dtype=float),
            np.array(getattr(second, name), dtype=float),
            err_msg=f"{name}: {what}",
        )
    assert first.values.keys() == second.values.keys(), what
    for name, value in first.values.items():
        assert np.array_equal(value, second.values[name]), f"{name}: {what}"


def stages(path: Path, *, every: bool = False) -> list[dict[str, Any]]:
    """Stages 0, 1 and 3 with states on the device, the host and the drive; ``every``: 2 too, and 3 with
    its parameters elsewhere than its states."""
    common = {"persistence_threshold_numel": 1000, "pin_memory": False}
    nvme = {"optimizer": "nvme", "paths": [str(path)], "resident_memory": 0}
    few: list[dict[str, Any]] = [
        {"stage": 0, "optimizer": "device"},
        {"stage": 1, "optimizer": "host"},
        {"stage": 3, "params": "nvme", **nvme},
    ]
    more = [{"stage": 2, **nvme}, {"stage": 3, "params": "host", "optimizer": "device"}]
    return [{**config, **common} for config in (few + more if every else few)]
