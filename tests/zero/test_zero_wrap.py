"""Which modules are gathered as units."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from zero_models import Block, Nested, Plain, Tied

import tiermem
from tiermem.errors import BudgetError, ConfigError, StateError


def units(model: nn.Module, runtime: tiermem.Runtime, wrap=None) -> list[str]:
    tiermem.shard(model, runtime, wrap=wrap)
    return [group.name for group in runtime.groups if not group.small]


def test_repeated_blocks_are_found(make_runtime) -> None:
    blocks = [f"blocks.{i}" for i in range(4)]
    assert units(Plain(), make_runtime()) == ["embedding", *blocks, "head"]


def test_a_tied_parameter_belongs_to_the_first(make_runtime) -> None:
    assert "head" not in units(Tied(), make_runtime())


@pytest.mark.parametrize("form", ["name", "class", "module"])
def test_three_ways_to_say_it(make_runtime, form: str) -> None:
    model = Nested()
    wrap = {
        "name": ["outer.0.first", "outer.0.second", "outer.1.first", "outer.1.second"],
        "class": [Block],
        "module": [model.outer[i].get_submodule(n) for i in (0, 1) for n in ("first", "second")],
    }[form]
    found = units(model, make_runtime(), wrap)
    assert found == [
        "embedding",
        "outer.0.mix",
        "outer.0.first",
        "outer.0.second",
        "outer.1.mix",
        "outer.1.first",
        "outer.1.second",
        "head",
    ]


def test_a_generator_of_mixed_items(make_runtime) -> None:
    model = Nested()
    found = units(model, make_runtime(), (item for item in ["outer.0", model.outer[1], nn.Embedding]))
    assert found == ["embedding", "outer.0", "outer.1", "head"]


@pytest.mark.parametrize(
    ("wrap", "message"),
    [(["outer.7"], "outer.7"), ([nn.Conv2d], "Conv2d"), ([nn.Linear(1, 1)], "Linear")],
)
def test_what_is_not_there_is_named(make_runtime, wrap, message: str) -> None:
    model = Nested()
    before = list(model.parameters())
    with pytest.raises(ConfigError, match=message):
        tiermem.shard(model, make_runtime(), wrap=wrap)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_lazy_modules_are_refused(make_runtime) -> None:
    with pytest.raises(StateError, match="lazy"):
        tiermem.shard(nn.Sequential(nn.LazyLinear(4)), make_runtime())


def test_a_model_without_parameters(make_runtime) -> None:
    model = tiermem.shard(nn.Sequential(nn.ReLU(), nn.Flatten()), make_runtime())
    assert torch.equal(model(torch.ones(2, 2)), torch.ones(2, 2))


def test_device_memory_too_small_says_what_would_do(make_runtime) -> None:
    model = Plain()
    with pytest.raises(BudgetError) as caught:
        tiermem.shard(model, make_runtime(device_memory=8192))
    found = re.search(r"smallest that works is [^(]*\((\d+) bytes\)", str(caught.value))
    smallest = int(found.group(1))
    runtime = make_runtime(device_memory=smallest)
    tiermem.shard(model, runtime)
    assert runtime.stats().device.budget == smallest
