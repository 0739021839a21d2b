"""Sharding changes no name, no key and no order."""

from __future__ import annotations

import io

import pytest
import torch
from zero_models import Attention, Convolutions, OnRoot, Plain, Recurrent, Tied, WeightNorm
from zero_twins import values

MODELS = [Plain, Tied, OnRoot, Convolutions, Attention, Recurrent, WeightNorm]


@pytest.mark.parametrize("build", MODELS)
def test_names_and_keys(make_twins, build) -> None:
    twins = make_twins(build)
    plain, model = twins.plain, twins.model
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in plain.named_modules()] == [n for n, _ in model.named_modules()]
    assert [type(m).__name__ for m in plain.modules()] == [type(m).__name__ for m in model.modules()]
    expected, found = plain.state_dict(), model.state_dict()
    assert list(expected) == list(found)
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key


def test_state_dict_survives_saving_and_later_steps(twins) -> None:
    twins.step()
    state = twins.model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    kept = {key: value.clone() for key, value in twins.plain.state_dict().items()}
    twins.steps(2, first=1)
    file.seek(0)
    loaded = torch.load(file)
    for key, value in kept.items():
        assert torch.equal(value, loaded[key]), key
        assert torch.equal(value, state[key]), key


def test_state_dict_needs_no_more_memory_than_a_unit(twins) -> None:
    state = twins.model.state_dict()
    assert len(state) == len(twins.plain.state_dict())
    stats = twins.runtime.stats()
    assert stats.device.peak <= stats.device.budget
    twins.steps(2)  # nothing of the sweep is held
    twins.check()


def test_tied_parameters_stay_tied(make_twins) -> None:
    twins = make_twins(Tied)
    assert twins.model.head.weight is twins.model.embedding.weight
    assert len(values(twins.model)) == len(list(twins.plain.parameters()))
    twins.step()
    assert twins.model.head.weight is twins.model.embedding.weight


def test_keep_vars_gives_the_parameters(twins) -> None:
    state = twins.model.state_dict(keep_vars=True)
    assert state["head.weight"] is twins.model.head.weight
