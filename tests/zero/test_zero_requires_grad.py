"""Freezing and unfreezing between steps."""

from __future__ import annotations

import pytest
from zero_models import Checkpointed, FrozenBlocks, OnlyHead, PartlyFrozen, Plain


@pytest.mark.parametrize("mode", ["deferred", "backward"])
@pytest.mark.parametrize("build", [Plain, Checkpointed])
def test_freeze_and_back(make_twins, build, mode: str) -> None:
    twins = make_twins(build, update=mode)
    twins.steps(2)
    for model, _ in twins.both:
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.weight.requires_grad = False
    twins.steps(2, first=2)
    for model, _ in twins.both:
        model.requires_grad_(True)
    twins.steps(2, first=4)
    twins.check()


@pytest.mark.parametrize("mode", ["deferred", "backward"])
@pytest.mark.parametrize("build", [FrozenBlocks, PartlyFrozen, OnlyHead])
def test_unfreeze_what_was_frozen_at_first(make_twins, build, mode: str) -> None:
    twins = make_twins(build, update=mode)
    twins.steps(2)
    for model, _ in twins.both:
        model.blocks[1].requires_grad_(True)
    twins.steps(2, first=2)
    for model, _ in twins.both:
        model.requires_grad_(True)
    twins.steps(2, first=4)
    twins.check()


def test_gradual_unfreezing_and_freezing(make_twins) -> None:
    twins = make_twins(OnlyHead)
    for step in range(8):
        for model, _ in twins.both:
            model.blocks[step % 4].requires_grad_(step < 4)
        twins.step(step)
    twins.check()


def test_frozen_parameters_get_no_state(make_twins) -> None:
    twins = make_twins(FrozenBlocks)
    twins.steps(2)
    assert twins.optimizer.state.get(twins.model.blocks[0].up.weight) is None
    assert twins.runtime.stats().placement["exp_avg"]["nvme"] < 2 * 64 * 64 * 4 + 64 * 4096
