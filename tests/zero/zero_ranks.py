"""Twins over several ranks, and tables of cases that run at several world sizes.

A case is a function of a directory. Alone (world size 1) it runs in the test's own process, without a
process group; over ranks all cases of a table run one after another in the same processes, since to
start those takes longer than a case.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import distributed as dist
from torch import nn
from zero_models import Structure
from zero_twins import MasterAdamW, Twins, batch, settings

import tiermem

SIZES = (1, 2)

Case = Callable[[str], None]
Cases = Mapping[str, Case]


def my_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class RankTwins(Twins):
    """`Twins` whose plain model has its gradients averaged over all ranks; alone they are `Twins`."""

    def step(self, seed: int = 0, loss: Any = None) -> None:
        values = []
        for model, optimizer in self.both:
            torch.manual_seed(1000 + seed)
            value = (loss or self.loss)(model, self.batch(seed))
            value.backward()
            self.update(model, optimizer)
            values.append(value.item())
        self.losses.append((values[0], values[1]))

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """What follows the last backward of a step."""
        if model is self.plain:
            average(model)
        optimizer.step()
        optimizer.zero_grad()

    def batch(self, seed: int) -> torch.Tensor:
        """This rank's tokens (4, 8) of step ``seed``."""
        return batch(10 * seed + my_rank())


def average(model: nn.Module) -> None:
    """Gradients as the mean over ranks, added in fp32 in their order and rounded once; one that is on
    some rank is on all."""
    if world_size() == 1:
        return
    for param in model.parameters():
        present = torch.tensor(float(param.grad is not None))
        dist.all_reduce(present)
        if present.item():
            mine = torch.zeros_like(param) if param.grad is None else param.grad
            every = [torch.empty(param.shape, dtype=param.dtype) for _ in range(world_size())]
            dist.all_gather(every, mine.contiguous())
            total = every[0].float()
            for other in every[1:]:
                total += other
            total *= 1 / len(every)
            param.grad = torch.empty_like(param).copy_(total)


def make_twins(
    build: Callable[[], nn.Module], path: str, structure: Structure | None = None, **changes: Any
) -> RankTwins:
    """Twins of ``build()`` on a runtime of their own, which the caller closes. The plain one of bf16
    parameters is trained with fp32 masters beside it."""
    structure = structure or Structure(build)
    options = {"host_memory": "32MiB", **structure.options, **changes}
    runtime = tiermem.Runtime(settings(Path(path), **options))
    return twins_on(runtime, build, structure)


def twins_on(
    runtime: tiermem.Runtime,
    build: Callable[[], nn.Module],
    structure: Structure | None = None,
    seed: int = 7,
) -> RankTwins:
    """Twins on a runtime that may have others."""
    structure = structure or Structure(build)
    torch.manual_seed(seed)
    plain = build()
    torch.manual_seed(seed + my_rank())  # the first rank's values are taken
    model = build()
    tiermem.shard(model, runtime, wrap=structure.wrap(model))
    return RankTwins(
        plain,
        model,
        runtime,
        MasterAdamW(plain.parameters(), lr=1e-2),
        tiermem.optim.AdamW(model.parameters(), lr=1e-2),
        structure.loss,
    )


def changes_of(stage: int) -> dict[str, Any]:
    """What a configuration of that stage needs beside `settings`."""
    if stage == 3:
        return {"stage": 3}
    # Parameters are whole on the device, and so is what checkpointing keeps of them.
    return {"stage": stage, "params": "device", "device_memory": None}


def run_cases(rank: int, size: int, cases: Cases, path: str) -> dict[str, str]:
    """What went wrong, by case."""
    wrong = {}
    for name, case in cases.items():
        try:
            case(path)
        except Exception:
            wrong[name] = traceback.format_exc()
    return wrong


def at_sizes(cases: Cases, in_short: Callable[[str], bool] = lambda name: True) -> list[Any]:
    """Parameters (name, size) of a test: every case alone, and over ranks, where those that are not
    ``in_short`` are slow."""
    return [
        pytest.param(
            name,
            size,
            id=f"{name}-{size}",
            marks=() if size == 1 or in_short(name) else pytest.mark.slow,
        )
        for size in SIZES
        for name in cases
    ]


@dataclass
class CaseRunner:
    """Runs the cases of one test module. ``chosen``: (name, size) of the tests that will run."""

    path: Path
    chosen: set[tuple[str, int]]
    limit_s: float = 120
    _wrong: dict[int, list[dict[str, str]]] = field(default_factory=dict)

    def check(self, cases: Cases, name: str, size: int) -> None:
        """Fails with what ``cases[name]`` raised at world size ``size``. ``cases`` is the module's
        one table; over ranks all of it that is chosen runs the first time."""
        if size == 1:
            cases[name](str(self.path))
            return
        if size not in self._wrong:
            some = {n: case for n, case in cases.items() if (n, size) in self.chosen}
            self._wrong[size] = run_ranks(run_cases, size, some, str(self.path), timeout_s=self.limit_s)
        said = [f"rank {rank}: {w[name]}" for rank, w in enumerate(self._wrong[size]) if name in w]
        assert not said, "\n".join(said)
