"""Whatever a model is built of, sharded training over two ranks gives the bits of plain training whose
gradients are averaged: summed over the ranks in their order, in fp32."""

from __future__ import annotations

import itertools
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from zero_models import STRUCTURES, WIDTH, Block, Plain, RandomBranch, Structure
from zero_ranks import changes_of, make_twins


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


class AlikeBranch(Plain):
    """Two of the blocks at random, the same ones on all ranks, which have the same seed."""

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in torch.randperm(len(self.blocks))[:2]:
            x = self.blocks[index](x)
        return x


CASES: dict[str, Structure] = {
    **STRUCTURES,
    "branches at random, alike": Structure(AlikeBranch),
    "unused on one rank": Structure(UnusedOnOneRank),
    "unused in turn": Structure(UnusedInTurn),
    "branches at random": Structure(RandomBranch),
}
DIFFERENT_UNITS = ("branches at random",)
"""Ranks use different units: at stage 3 that is refused, since gathers need all of them."""

IN_SHORT = (
    "tied",
    "checkpoint",
    "checkpoint reentrant",
    "checkpoint pieces",
    "frozen blocks",
    "unused block",
    "degenerate, all leave",
    "channels last",
    "branches at random, alike",
)
SMALL = ("degenerate", "degenerate, all leave", "transposed", "tied", "unused in turn")


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


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.timeout(400)
def test_more_ranks_than_elements(size: int, tmp_path: Path) -> None:
    wrong = run_ranks(run_cases, size, cases_of(SMALL, (3, 2)), str(tmp_path), timeout_s=300)
    assert not any(wrong), "\n".join(itertools.chain.from_iterable(wrong))
