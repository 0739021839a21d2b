"""``update: backward`` refuses what it cannot do right, names the remedy, half-updates nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_models import CheckpointedReentrant, Plain, loss_of
from zero_twins import batch, values

import tiermem
from tiermem.errors import StateError

REMEDY = "deferred"


@pytest.fixture
def inside(make_twins):
    twins = make_twins(update="backward")
    twins.steps(2)
    return twins


def same(before, after) -> bool:
    return all((before[name] == after[name]).all() for name in before)


def test_second_backward(inside) -> None:
    loss_of(inside.model, batch(2)).backward()
    loss = loss_of(inside.model, batch(3))
    with pytest.raises(StateError, match=REMEDY):
        loss.backward()
    del loss
    loss_of(inside.plain, batch(2)).backward()
    for _, optimizer in inside.both:  # the step of the first backward is whole
        optimizer.step()
        optimizer.zero_grad()
    inside.steps(2, first=4)
    inside.check()


def test_clipping(inside) -> None:
    with pytest.raises(StateError, match=REMEDY):
        inside.optimizer.clip_grad_norm_(1.0)
    inside.steps(2, first=2)
    inside.check()


def test_retained_graph(inside) -> None:
    before = values(inside.model)
    loss = loss_of(inside.model, batch(2))
    with pytest.raises(StateError, match=REMEDY):
        loss.backward(retain_graph=True)
    del loss
    assert same(before, values(inside.model))
    inside.optimizer.zero_grad()
    inside.steps(2, first=2)
    inside.check()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoint(make_twins) -> None:
    twins = make_twins(CheckpointedReentrant, update="backward")

    def forward(tokens):
        x = twins.model.embedding(tokens)
        for block in twins.model.blocks:
            from torch.utils.checkpoint import checkpoint

            x = checkpoint(block, x, use_reentrant=True)
        return x.square().mean()  # no head: the first gradient is inside a nested backward

    before = values(twins.model)
    loss = forward(batch(0))
    with pytest.raises(StateError, match=REMEDY):
        loss.backward()
    del loss
    assert same(before, values(twins.model))


def test_zero_grad_without_step(inside) -> None:
    for model, _ in inside.both:
        loss_of(model, batch(2)).backward()
    with pytest.raises(StateError, match=REMEDY):
        inside.optimizer.zero_grad()
    for _, optimizer in inside.both:
        optimizer.step()
        optimizer.zero_grad()
    inside.steps(2, first=3)
    inside.check()


@pytest.mark.parametrize("option", [("lr", 0.5), ("weight_decay", 0.3), ("eps", 1e-3)])
def test_option_changed_between_backward_and_step(inside, option) -> None:
    key, value = option
    for model, _ in inside.both:
        loss_of(model, batch(2)).backward()
    group = inside.optimizer.param_groups[0]
    old, group[key] = group[key], value
    with pytest.raises(StateError, match=REMEDY):
        inside.optimizer.step()
    group[key] = old
    for _, optimizer in inside.both:
        optimizer.step()
        optimizer.zero_grad()
    inside.steps(2, first=3)
    inside.check()


def test_options_changed_after_step_are_for_the_next(inside) -> None:
    for step, lr in enumerate((1e-2, 3e-3, 1e-3), start=2):
        inside.step(step)
        for _, optimizer in inside.both:
            optimizer.param_groups[0]["lr"] = lr
    inside.check()


@pytest.mark.parametrize("declared", [{"gradient_clipping": 1.0}, {"gradient_accumulation_steps": 2}])
def test_declarations_that_contradict(make_runtime, declared) -> None:
    with pytest.raises(ValueError, match=REMEDY):
        make_runtime(update="backward", **declared)


def test_declared_as_safe_it_is_chosen(make_twins) -> None:
    twins = make_twins(Plain, gradient_accumulation_steps=1, gradient_clipping=0)
    assert twins.runtime.stats().update_mode == "backward"
    twins.steps(3)
    twins.check()


def test_two_optimizers_over_one_graph(make_runtime) -> None:
    """The step of one does not excuse the other from having been updated."""
    runtime = make_runtime(update="backward", persistence_threshold_numel=0, device_memory="1MiB")
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    tiermem.shard(nn.ModuleDict({"first": first, "second": second}), runtime)
    optimizers = [tiermem.optim.AdamW(m.parameters()) for m in (first, second)]
    second(first(torch.ones(2, 64))).sum().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    with pytest.raises(StateError, match="two optimizers"):
        optimizers[1].zero_grad()
    optimizers[1].step()
    optimizers[1].zero_grad()
