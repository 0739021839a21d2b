"""Adam with L2 decay and SGD: the bits of torch's fused ones, in every placement and over masters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_rig import PLACEMENTS, assert_equal_to, inputs, make_net, sharded, take_step

import tiermem
from tiermem.errors import ConfigError, StateError

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    ("Adam", {"lr": 1e-2, "betas": (0.5, 0.9), "maximize": True}),
    ("SGD", {"lr": 1e-1}),
    ("SGD", {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": torch.tensor(1e-1), "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 1e-1, "momentum": 0.9, "dampening": 0.3}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bits_of_torch(placement: str, kind: str, options: Any, tmp_path: Path) -> None:
    theirs = make_net()
    their = getattr(torch.optim, kind)(theirs.parameters(), fused=True, **options)
    with sharded(tmp_path, placement, sub_group_numel=4096) as (_, ours):
        optimizer = getattr(tiermem.optim, kind)(ours.parameters(), **options)
        for step in range(4):
            branch = step != 1  # a parameter without a gradient stands still
            assert take_step(ours, optimizer, step, branch=branch) == take_step(
                theirs, their, step, branch=branch
            )
        assert_equal_to(ours, theirs)
        for param, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
            for key, value in their.state[twin].items():
                if value is not None:
                    assert torch.equal(optimizer.state[param][key], value), key


@pytest.mark.parametrize(("kind", "options"), [CASES[0], CASES[3]])
@pytest.mark.parametrize(
    "changes",
    [
        {"compute_dtype": "bf16", "master": "split"},
        {"compute_dtype": "bf16", "master": "fp32"},
        {"compute_dtype": "fp16", "fp16": {"loss_scale": 1.0}},
    ],
)
def test_16_bit_parameters_are_updated_through_their_masters(
    kind: str, options: Any, changes: Any, tmp_path: Path
) -> None:
    masters = [p.detach().clone().requires_grad_() for p in make_net().parameters()]
    their = getattr(torch.optim, kind)(masters, fused=True, **options)
    with sharded(tmp_path, "nvme", **changes) as (_, ours):
        dtype = next(ours.parameters()).dtype
        optimizer = getattr(tiermem.optim, kind)(ours.parameters(), **options)
        for step in range(3):
            loss = ours(inputs(step).to(dtype)).float().square().mean()
            optimizer.scale(loss).backward()
            for param, twin in zip(ours.parameters(), masters, strict=True):
                gradient = tiermem.full_grad(param)
                assert gradient is not None
                twin.grad = gradient.float()
            optimizer.step()
            their.step()
        for param, twin in zip(ours.parameters(), masters, strict=True):
            assert torch.equal(tiermem.full_master(param), twin.detach())


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_state_goes_to_and_from_torch(kind: str, options: Any, tmp_path: Path) -> None:
    theirs = make_net()
    their = getattr(torch.optim, kind)(theirs.parameters(), fused=True, **options)
    for step in range(2):
        take_step(theirs, their, step)
    with sharded(tmp_path, "nvme") as (_, ours):
        ours.load_state_dict(theirs.state_dict())
        optimizer = getattr(tiermem.optim, kind)(ours.parameters(), **options)
        optimizer.load_state_dict(their.state_dict())
        assert take_step(ours, optimizer, 2) == take_step(theirs, their, 2)
        assert_equal_to(ours, theirs)
        saved = copy.deepcopy(optimizer.state_dict())
        back = make_net()
        back.load_state_dict(theirs.state_dict())
    again = getattr(torch.optim, kind)(back.parameters(), fused=True, **options)
    for group in saved["param_groups"]:
        group.update({k: v for k, v in again.param_groups[0].items() if k not in group})
    again.load_state_dict(saved)
    for step in (3, 4):
        assert take_step(back, again, step) == take_step(theirs, their, step)


def test_budgets_are_planned_for_what_is_kept(tmp_path: Path) -> None:
    """Parameters, gradients and momentum are 12 bytes an element, with AdamW's moments 16."""
    numel = sum(p.numel() for p in make_net().parameters())
    config = {"host_memory": numel * 14, "persistence_threshold_numel": 0, "device": "cpu"}
    with tiermem.Runtime({**config, "pin_memory": False}) as runtime:
        with pytest.raises(tiermem.errors.BudgetError):
            tiermem.shard(make_net(), runtime)
        states = tiermem.optim.SGD.states_of(momentum=0.9)
        model = tiermem.shard(make_net(), runtime, states=states)
        optimizer = tiermem.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        take_step(model, optimizer, 0)


def test_without_momentum_nothing_is_kept(tmp_path: Path) -> None:
    with sharded(tmp_path) as (runtime, model):
        optimizer = tiermem.optim.SGD(model.parameters(), lr=1e-2)
        take_step(model, optimizer, 0)
        assert set(runtime.stats().placement) == {"param"}
        assert all(list(state) == ["step"] for state in optimizer.state.values())


def test_momentum_that_begins_later_begins_as_in_torch(tmp_path: Path) -> None:
    theirs = make_net()
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}
    their = torch.optim.SGD(theirs.parameters(), fused=True, **options)
    with sharded(tmp_path) as (_, ours):
        mine = tiermem.optim.SGD(ours.parameters(), **options)
        for step in range(5):
            for optimizer in (their, mine):
                optimizer.param_groups[0]["momentum"] = 0.0 if step < 2 else 0.9
            assert take_step(ours, mine, step) == take_step(theirs, their, step)
        assert_equal_to(ours, theirs)


def test_updates_inside_backward_are_the_same(tmp_path: Path) -> None:
    ends = []
    for update in ("deferred", "backward"):
        with sharded(tmp_path, update=update) as (_, model):
            optimizer = tiermem.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            for step in range(3):
                take_step(model, optimizer, step)
            ends.append([tiermem.full_param(p) for p in model.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum_buffer": [1.0]}, "momentum_buffer of 'first.weight' is a list"),
        ({"step": float("nan")}, "step of 'first.weight' is nan"),
        ({"step": -4}, "step of 'first.weight' is -4"),
    ],
)
def test_states_that_are_none(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        take_step(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0].update(changes)
        with pytest.raises(StateError, match=message):
            optimizer.load_state_dict(saved)
        saved["state"][0].update({"momentum_buffer": None, "step": 0})  # as torch saves what has none
        optimizer.load_state_dict(saved)
        take_step(model, optimizer, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"nesterov": True}, "nesterov=True with momentum 0.0 and dampening 0.0"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening 0.1"),
        ({"lr": "fast"}, "lr is 'fast'"),
    ],
)
def test_options_that_cannot_work(options: Any, message: str, tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model), pytest.raises(ConfigError, match=message):
        tiermem.optim.SGD(model.parameters(), **options)


def test_momentum_that_comes_later_is_refused(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.SGD(model.first.parameters(), lr=1e-2)
        with pytest.raises(ConfigError, match="was made without, and keeps no buffer"):
            optimizer.add_param_group({"params": list(model.second.parameters()), "momentum": 0.9})
        model(inputs(0)).square().mean().backward()
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ConfigError, match="was made without"):
            optimizer.step()
