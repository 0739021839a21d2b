"""Whatever a model is built of, sharded training gives the bits of plain training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_models import STRUCTURES, Plain, RandomBranch
from zero_twins import batch

CASES = [
    pytest.param(name, mode, prefetch, id=f"{name}-{mode}-{'ahead' if prefetch else 'demand'}")
    for name, structure in STRUCTURES.items()
    for mode in structure.modes
    for prefetch in ((0, 100_000) if structure.also_ahead else (0,))
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "mode", "prefetch"), CASES)
def test_structures(make_twins, name: str, mode: str, prefetch: int) -> None:
    structure = STRUCTURES[name]
    options = {"update": mode, "prefetch_bytes": prefetch} | structure.options
    twins = make_twins(structure.build, loss=structure.loss, wrap=structure.wrap, **options)
    twins.steps(5)
    twins.check(inexact=structure.inexact)
    stats = twins.runtime.stats()
    assert stats.device.peak <= stats.device.budget
    assert stats.update_mode == mode


@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_branches_taken_at_random(make_twins, mode: str) -> None:
    twins = make_twins(RandomBranch, update=mode, prefetch_bytes=200_000)
    twins.steps(50)
    twins.check()


@pytest.mark.parametrize("threshold", [0, 1 << 20], ids=["all leave", "all stay"])
@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_persistence_changes_no_bit(make_twins, mode: str, threshold: int) -> None:
    twins = make_twins(update=mode, persistence_threshold_numel=threshold)
    twins.steps(3)
    twins.check()


@pytest.mark.parametrize("micro_steps", [2, 3])
def test_accumulation(make_twins, micro_steps: int) -> None:
    twins = make_twins()
    for step in range(3):
        for model, optimizer in twins.both:
            for micro in range(micro_steps):
                (twins.loss(model, batch(step * 10 + micro)) / micro_steps).backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.check()


class Empty(Plain):
    """A parameter without elements, alone beside the units."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.empty.sum()


@pytest.mark.parametrize("mode", ["deferred", "backward"])
@pytest.mark.parametrize("threshold", [0, 100])
def test_a_parameter_without_elements(make_twins, threshold: int, mode: str) -> None:
    twins = make_twins(Empty, persistence_threshold_numel=threshold, update=mode)
    twins.steps(3)
    twins.check()
