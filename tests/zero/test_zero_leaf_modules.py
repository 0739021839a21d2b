"""A leaf module is gathered whole, so that ranks may use different modules below it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import rank_outcomes, run_ranks
from torch import nn

import tiermem
from tiermem.errors import ConfigError, StateError
from tiermem.zero.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from tiermem.zero.wrap import plan_units

WIDTH = 64


class Mixture(nn.Module):
    """Rows go to the expert that their first element names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        x = self.gate(x)
        return x + sum(self.experts[index](x) for index in chosen)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return self.last(self.mixture(self.first(x), chosen))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"moe": Mixture()}) for _ in range(2))


def units(model: nn.Module, wrap: Any = None) -> dict[str, list[str]]:
    return {unit.name: [p.name for p in unit.params] for unit in plan_units(model, wrap)}


@pytest.mark.parametrize("wrap", [None, [nn.Linear], ["mixture.experts.1", "mixture.gate"]])
def test_a_leaf_is_one_unit(wrap: Any) -> None:
    model = Model()
    assert units(model, wrap).keys() != {"first", "mixture", "last"}
    assert set_z3_leaf_modules(model, [Mixture]) == [model.mixture]
    found = units(model, wrap)
    assert found.keys() == {"first", "mixture", "last"}
    assert found["mixture"] == [f"mixture.{name}" for name, _ in model.mixture.named_parameters()]


def test_a_leaf_inside_a_unit_belongs_to_it() -> None:
    model = Layered()
    before = units(model)
    set_z3_leaf_modules(model, [Mixture])
    assert units(model) == before
    assert before.keys() == {"layers.0", "layers.1"}
    assert units(model, [Mixture]).keys() == {"layers.0.moe", "layers.1.moe"}


def test_the_outermost_leaf_counts() -> None:
    model = Layered()
    set_z3_leaf_modules(model, ["Mixture", "torch.nn.modules.container.ModuleList"])
    assert units(model, [Mixture]).keys() == {"layers"}


def test_marks_are_set_and_taken_back() -> None:
    model = Model()
    set_z3_leaf_module(model.last, True)
    set_z3_leaf_modules(model, ["Mixture"])
    assert get_z3_leaf_modules(model) == [model.mixture, model.last]
    assert z3_leaf_module(model.last)
    assert not z3_leaf_module(model.first)
    assert unset_z3_leaf_modules(model, [Mixture]) == [model.mixture]
    set_z3_leaf_module(model.last, False)
    assert get_z3_leaf_modules(model) == []
    assert units(model) == units(Model())


def test_what_cannot_be_is_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match=r"LSTM: no module of the model.*Mixture, Model"):
        set_z3_leaf_modules(model, [Mixture, nn.LSTM])
    assert get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules(model, [nn.LSTM], raise_if_not_found=False) == []
    with pytest.raises(ConfigError, match="no class"):
        set_z3_leaf_modules(model, [model.mixture])  # type: ignore[list-item]
    with tiermem.Runtime({"device": "cpu", "host_memory": "16MiB"}) as runtime:
        tiermem.shard(model, runtime)
        with pytest.raises(StateError, match="mark leaf modules before"):
            set_z3_leaf_modules(model, [Mixture])
        with pytest.raises(StateError, match="mark leaf modules before"):
            set_z3_leaf_module(model.mixture, True)


def train(rank: int, size: int, leaf: bool) -> list[np.ndarray]:
    """Each rank uses experts that no other uses."""
    torch.manual_seed(1)
    model = Model()
    before = model.mixture.experts[0][0].weight.detach().clone()
    if leaf:
        set_z3_leaf_modules(model, [Mixture])
    config = {"device": "cpu", "host_memory": "32MiB", "persistence_threshold_numel": 0}
    with tiermem.Runtime(config) as runtime:
        tiermem.shard(model, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.full((2, WIDTH), 1.0 + step + rank)
            model(x, [2 * rank, 2 * rank + 1][: 1 + step % 2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        params = [tiermem.full_param(param) for param in model.parameters()]
        assert not torch.equal(tiermem.full_param(model.mixture.experts[0][0].weight), before)
    return [param.numpy() for param in params]


def test_ranks_that_choose_other_experts_train_together() -> None:
    first, second = run_ranks(train, 2, True, timeout_s=60)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_a_leaf_they_learn_which_module_it_was() -> None:
    for outcome in rank_outcomes(train, 2, False, timeout_s=60):
        assert "mixture.experts" in outcome.error
        assert "RankError" in outcome.error
