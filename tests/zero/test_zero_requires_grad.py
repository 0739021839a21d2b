"""Freezing and unfreezing between steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_models import Checkpointed, FrozenBlocks, OnlyHead, PartlyFrozen, Plain

import tiermem
from tiermem.errors import BudgetError


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


def test_unfreezing_without_room_changes_nothing(make_runtime) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).requires_grad_(False)
        model[0].bias.requires_grad_(True)
        return model

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(torch.ones(2, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    plain = build()
    their = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    runtime = make_runtime(
        params="host",
        optimizer="host",
        host_memory="1500KiB",
        paths=[],
        persistence_threshold_numel=0,
        device_memory="2MiB",
    )
    model = tiermem.shard(build(), runtime)
    optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
    assert [step(model, optimizer) for _ in range(2)] == [step(plain, their) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(BudgetError):
            model[0].weight.requires_grad_(True)
        assert not model[0].weight.requires_grad
        assert [step(model, optimizer) for _ in range(2)] == [step(plain, their) for _ in range(2)]
