"""Whatever a model is built of, sharded training over two ranks gives the bits of plain training whose
gradients are averaged: summed over the ranks in their order, in fp32."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from zero_models import STRUCTURES, WIDTH, Block, Plain, RandomBranch, Structure
from zero_twins import Twins, batch, settings

import tiermem


class Gated(Block):
    """A parameter that not every rank uses, beside others that all use."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH, WIDTH) * 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + functional.linear(x, self.extra) if self.uses_extra() else y

    def uses_extra(self) -> bool:
        return dist.get_rank() == 1


class UnusedOnOneRank(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(6))


class GatedInTurn(Gated):
    number = 0

    def uses_extra(self) -> bool:
        self.number += 1
        return (dist.get_rank() + self.number) % 3 > 0


class UnusedInTurn(Plain):
    """Another rank leaves another block's parameter alone in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedInTurn() for _ in range(6))
        for number, block in enumerate(self.blocks):
            block.number = number


CASES: dict[str, Structure] = {
    **STRUCTURES,
    "unused on one rank": Structure(UnusedOnOneRank),
    "unused in turn": Structure(UnusedInTurn),
    "branches at random": Structure(RandomBranch),
}
DIFFERENT_UNITS = ("branches at random",)
"""Ranks use different units: at stage 3 that is refused, since gathers need all of them."""

IN_SHORT = ("tied", "checkpoint", "checkpoint reentrant", "frozen blocks", "unused block")


class RankTwins(Twins):
    """`Twins` whose plain model has its gradients averaged over all ranks."""

    def step(self, seed: int = 0, loss: Any = None) -> None:
        values = []
        for model, optimizer in self.both:
            torch.manual_seed(1000 + seed)
            value = (loss or self.loss)(model, batch(10 * seed + dist.get_rank()))
            value.backward()
            if model is self.plain:
                average(model)
            optimizer.step()
            optimizer.zero_grad()
            values.append(value.item())
        self.losses.append((values[0], values[1]))


def average(model: nn.Module) -> None:
    """Gradients as the mean over ranks; one that is on some rank is on all."""
    for param in model.parameters():
        present = torch.tensor(float(param.grad is not None))
        dist.all_reduce(present)
        if present.item():
            mine = torch.zeros_like(param) if param.grad is None else param.grad
            every = [torch.empty(param.shape) for _ in range(dist.get_world_size())]
            dist.all_gather(every, mine.contiguous())
            total = every[0].clone()
            for other in every[1:]:
                total += other
            total *= 1 / len(every)
            param.grad = torch.empty_like(param).copy_(total)


def make_twins(
    build: Callable[[], nn.Module], path: str, structure: Structure, **changes: Any
) -> RankTwins:
    torch.manual_seed(7)
    plain = build()
    torch.manual_seed(7 + dist.get_rank())  # the first rank's values are taken
    model = build()
    options = {"host_memory": "32MiB", **structure.options, **changes}
    runtime = tiermem.Runtime(settings(Path(path), **options))
    tiermem.shard(model, runtime, wrap=structure.wrap(model))
    return RankTwins(
        plain,
        model,
        runtime,
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        tiermem.optim.AdamW(model.parameters(), lr=1e-2),
        structure.loss,
    )


def changes_of(stage: int) -> dict[str, Any]:
    if stage == 3:
        return {"stage": 3}
    # Parameters are whole on the device, and so is what checkpointing keeps of them.
    return {"stage": stage, "params": "device", "device_memory": None}


def run_case(name: str, stage: int, mode: str, path: str) -> None:
    structure = CASES[name]
    twins = make_twins(structure.build, path, structure, update=mode, **changes_of(stage))
    with twins.runtime:
        twins.steps(3)
        twins.check(inexact=structure.inexact)


def run_cases(rank: int, size: int, cases: list[tuple[str, int, str]], path: str) -> list[str]:
    """What went wrong, by case."""
    wrong = []
    for name, stage, mode in cases:
        try:
            run_case(name, stage, mode, path)
        except Exception:
            wrong.append(f"{name}, stage {stage}, {mode}: {traceback.format_exc()}")
    return wrong


def cases_of(names: Any, stages: Any) -> list[tuple[str, int, str]]:
    return [
        (name, stage, mode)
        for name, stage in itertools.product(names, stages)
        for mode in CASES[name].modes
        if stage < 3 or name not in DIFFERENT_UNITS
    ]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("names", "stages"),
    [
        pytest.param(IN_SHORT, (3,), id="in short"),
        pytest.param(("unused on one rank", "branches at random"), (3, 0), id="unused"),
        *(pytest.param(tuple(CASES), (s,), id=f"stage {s}", marks=pytest.mark.slow) for s in range(4)),
    ],
)
@pytest.mark.timeout(1200)
def test_structures(names: tuple[str, ...], stages: tuple[int, ...], tmp_path: Path) -> None:
    wrong = run_ranks(run_cases, 2, cases_of(names, stages), str(tmp_path), timeout_s=1000)
    assert wrong == [[], []], "\n".join(wrong[0] + wrong[1])


# ---- around training


def toggled(path: str, stage: int) -> None:
    """Frozen and thawed between steps."""
    twins = make_twins(Plain, path, CASES["plain"], **changes_of(stage))
    with twins.runtime:
        twins.step(0)
        for frozen in (True, False):
            for model, _ in twins.both:
                model.blocks[1].up.requires_grad_(not frozen)
                model.blocks[2].requires_grad_(not frozen)
            twins.steps(2, first=1 if frozen else 3)
        twins.check()


def two_models(path: str, stage: int) -> None:
    """Two models on one runtime, stepped in turn."""
    first = make_twins(Plain, path, CASES["plain"], **{**changes_of(stage), "device_memory": "4MiB"})
    with first.runtime as runtime:
        torch.manual_seed(8)
        plain = Plain()
        torch.manual_seed(8)
        model = Plain()
        tiermem.shard(model, runtime)
        second = RankTwins(
            plain,
            model,
            runtime,
            torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
            tiermem.optim.AdamW(model.parameters(), lr=1e-2),
        )
        for seed in range(3):
            first.step(seed)
            second.step(seed + 10)
        first.check()
        second.check()


def evaluated(path: str, stage: int) -> None:
    """Evaluation between backward and step, and between steps; also by another number of batches."""
    twins = make_twins(Plain, path, CASES["plain"], prefetch_bytes=200_000, **changes_of(stage))
    with twins.runtime:
        for seed in range(3):
            twins.step(seed)
            for model, _ in twins.both:
                model.eval()
            for _ in range(seed):
                with torch.no_grad():
                    outputs = [model(batch(seed)) for model, _ in twins.both]
                assert torch.equal(*outputs)
            for model, _ in twins.both:
                model.train()
        twins.check()


def accumulated(path: str, stage: int) -> None:
    """Several backwards for a step, a parameter replaced in between, one gradient forgotten."""
    twins = make_twins(Plain, path, CASES["plain"], **changes_of(stage))
    with twins.runtime:
        twins.step(0)
        for model, _ in twins.both:
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(0.5)
                model.head.weight.copy_(model.head.weight.clone() + 1)
        twins.step(1)
        twins.check(states=True)


AROUND = {f.__name__: f for f in (toggled, two_models, evaluated, accumulated)}


def run_around(rank: int, size: int, jobs: list[tuple[str, int]], path: str) -> list[str]:
    wrong = []
    for name, stage in jobs:
        try:
            AROUND[name](path, stage)
        except Exception:
            wrong.append(f"{name}, stage {stage}: {traceback.format_exc()}")
    return wrong


@pytest.mark.timeout(400)
def test_around_training(tmp_path: Path) -> None:
    jobs = [(name, stage) for name in AROUND for stage in (3, 2, 0)]
    wrong = run_ranks(run_around, 2, jobs, str(tmp_path), timeout_s=300)
    assert wrong == [[], []], "\n".join(wrong[0] + wrong[1])
