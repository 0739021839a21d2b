"""Any element-wise optimizer, slice by slice: the bits of the unsharded one; all others by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_rig import assert_equal_to, inputs, make_net, sharded, take_step
from ranks import run_ranks
from third_party import (
    ClipsLarge,
    Counting,
    CountsItself,
    CountsLate,
    FailsLater,
    KeepsLargest,
    Lamb,
    Lion,
    ManyOptions,
    Masked,
    Noisy,
    NoisyLater,
    StartsLate,
    StartsVeryLate,
)

import tiermem
from tiermem.errors import ConfigError, StateError

ELEMENTWISE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.Adamax, {"lr": 1e-2}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.ASGD, {"lr": 1e-2}),
    (torch.optim.Rprop, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "amsgrad": True}),
    (Lion, {"lr": 1e-3, "decay": 0.1}),
    (Masked, {}),
    (ManyOptions, {"lr": 1e-2, "momentum": 0.9}),
]
IDS = [kind.__name__ for kind, _ in ELEMENTWISE]


@pytest.mark.parametrize(("kind", "options"), ELEMENTWISE, ids=IDS)
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_bits_of_the_unsharded_one(placement: str, kind: Any, options: Any, tmp_path: Path) -> None:
    theirs = make_net()
    their = kind(theirs.parameters(), **options)
    with sharded(tmp_path, placement, sub_group_numel=4096) as (_, ours):
        optimizer = tiermem.optim.Tiered(kind, ours.parameters(), **options)
        for step in range(4):
            branch = step != 1  # a parameter without a gradient stands still
            assert take_step(ours, optimizer, step, branch=branch) == take_step(
                theirs, their, step, branch=branch
            )
        assert_equal_to(ours, theirs)
        for param, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
            state, expected = optimizer.state[param], their.state[twin]
            assert set(state) == set(expected)
            for key, value in expected.items():
                assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_16_bit_parameters_are_updated_through_their_masters(master: str, tmp_path: Path) -> None:
    masters = [p.detach().clone().requires_grad_() for p in make_net().parameters()]
    their = torch.optim.NAdam(masters, lr=1e-2)
    with sharded(tmp_path, "nvme", compute_dtype="bf16", master=master) as (_, ours):
        optimizer = tiermem.optim.Tiered(torch.optim.NAdam, ours.parameters(), lr=1e-2)
        for step in range(3):
            ours(inputs(step).bfloat16()).float().square().mean().backward()
            for param, twin in zip(ours.parameters(), masters, strict=True):
                gradient = tiermem.full_grad(param)
                assert gradient is not None
                twin.grad = gradient.float()
            optimizer.step()
            their.step()
        for param, twin in zip(ours.parameters(), masters, strict=True):
            assert torch.equal(tiermem.full_master(param), twin.detach())


def test_updates_inside_backward_are_the_same(tmp_path: Path) -> None:
    ends = []
    for update in ("deferred", "backward"):
        with sharded(tmp_path, update=update) as (_, model):
            optimizer = tiermem.optim.Tiered(Lion, model.parameters(), lr=1e-3)
            for step in range(3):
                take_step(model, optimizer, step)
            ends.append([tiermem.full_param(p) for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_changed_option_is_noticed_when_updates_are_inside_backward(tmp_path: Path) -> None:
    with sharded(tmp_path, update="backward") as (_, model):
        optimizer = tiermem.optim.Tiered(Lion, model.parameters(), lr=1e-3)
        model(inputs(0)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = 2e-3
        with pytest.raises(StateError, match="was changed between backward and step"):
            optimizer.step()


def test_groups_and_schedules_act(tmp_path: Path) -> None:
    def make(model: Any, kind: Any) -> Any:
        groups = [
            {"params": list(model.first.parameters()), "lr": 3e-2},
            {"params": [*model.second.parameters(), *model.branch.parameters()], "alpha": 0.8},
        ]
        return kind(groups)

    theirs = make_net()
    their = make(theirs, lambda groups: torch.optim.RMSprop(groups, lr=1e-2))
    with sharded(tmp_path) as (_, ours):
        mine = make(ours, lambda groups: tiermem.optim.Tiered(torch.optim.RMSprop, groups, lr=1e-2))
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (their, mine)]
        for step in range(3):
            assert take_step(ours, mine, step) == take_step(theirs, their, step)
            for schedule in schedules:
                schedule.step()
        assert_equal_to(ours, theirs)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adagrad, Lion])
def test_a_state_goes_to_and_from_the_unsharded_one(kind: Any, tmp_path: Path) -> None:
    theirs = make_net()
    their = kind(theirs.parameters(), lr=1e-2)
    for step in range(2):
        take_step(theirs, their, step)
    with sharded(tmp_path, "nvme") as (_, ours):
        ours.load_state_dict(theirs.state_dict())
        optimizer = tiermem.optim.Tiered(kind, ours.parameters(), lr=1e-2)
        optimizer.load_state_dict(their.state_dict())
        assert take_step(ours, optimizer, 2) == take_step(theirs, their, 2)
        assert_equal_to(ours, theirs)
        back = make_net()
        back.load_state_dict(theirs.state_dict())
        again = kind(back.parameters(), lr=1e-2)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (3, 4):
        assert take_step(back, again, step) == take_step(theirs, their, step)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (torch.optim.Adafactor, {}, r"Adafactor cannot run sharded.*'row_var' has shape \(8, 1\)"),
    (torch.optim.LBFGS, {}, "LBFGS cannot run sharded.*closure"),
    (torch.optim.Muon, {}, "Muon cannot be made over a flat slice"),
    (torch.optim.SparseAdam, {}, "SparseAdam cannot run sharded"),
    (Lamb, {}, "Lamb cannot run sharded.*depends on others"),
    (Noisy, {}, "Noisy cannot run sharded.*random numbers"),
    (Counting, {}, "Counting cannot run sharded.*changes 'k' of itself or of its parameter group"),
    (CountsItself, {}, "CountsItself cannot run sharded.*changes 'count'"),
    (CountsLate, {}, "CountsLate cannot run sharded.*changes 'k'"),
    (NoisyLater, {}, "NoisyLater cannot run sharded.*random numbers"),
    (ClipsLarge, {}, "ClipsLarge cannot run sharded.*depends on others"),
    (StartsLate, {}, "StartsLate cannot run sharded.*'slow' only after some steps"),
    (torch.optim.Adagrad, {"lr": -1.0}, "Adagrad cannot be made.*Invalid learning rate"),
    (torch.optim.Adagrad, {"beta": 1.0}, "Adagrad cannot be made.*beta"),
    (torch.nn.Linear, {}, "takes a class of optimizers first"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_what_is_not_elementwise_is_refused_by_name(
    kind: Any, options: Any, message: str, tmp_path: Path
) -> None:
    with sharded(tmp_path) as (_, model):
        before = torch.random.get_rng_state()
        with pytest.raises(ConfigError, match=message):
            tiermem.optim.Tiered(kind, model.parameters(), **options)
        assert torch.equal(before, torch.random.get_rng_state())
        tiermem.optim.Tiered(Lion, model.parameters())  # nothing was taken


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (KeepsLargest, "KeepsLargest keeps a 'amax' that depends on the values of all elements"),
        (StartsVeryLate, "StartsVeryLate keeps 'slow' only after some steps"),
        (FailsLater, r"FailsLater\.step\(\) failed: ZeroDivisionError: twenty"),
    ],
)
def test_what_shows_only_later_is_never_silent(kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=message), sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.Tiered(kind, model.parameters())
        for step in range(22):
            take_step(model, optimizer, step)


def test_groups_may_need_different_states(tmp_path: Path) -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(model.first.parameters())},
            {"params": list(model.second.parameters()), "momentum": 0.9},
            {"params": list(model.branch.parameters()), "centered": True},
        ]

    theirs = make_net()
    their = torch.optim.RMSprop(groups(theirs), lr=1e-3)
    with sharded(tmp_path) as (_, ours):
        optimizer = tiermem.optim.Tiered(torch.optim.RMSprop, iter(groups(ours)), lr=1e-3)
        for step in range(3):
            assert take_step(ours, optimizer, step) == take_step(theirs, their, step)
        assert_equal_to(ours, theirs)


def test_an_option_of_a_group_that_needs_another_state_is_refused(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.Tiered(torch.optim.SGD, model.first.parameters(), lr=0.1)
        late = {"params": list(model.second.parameters()), "momentum": 0.9}
        with pytest.raises(ConfigError, match="SGD keeps momentum_buffer, which it does not"):
            optimizer.add_param_group(late)


def test_budgets_are_planned_for_its_states(tmp_path: Path) -> None:
    """Parameters, gradients and Adagrad's one state are 12 bytes an element, with AdamW's two 16."""
    states = tiermem.optim.Tiered.states_of(torch.optim.Adagrad)
    numel = sum(p.numel() for p in make_net().parameters())
    config = {"host_memory": numel * 14, "persistence_threshold_numel": 0}
    with tiermem.Runtime({**config, "device": "cpu", "pin_memory": False}) as runtime:
        with pytest.raises(tiermem.errors.BudgetError):
            tiermem.shard(make_net(), runtime)
        model = tiermem.shard(make_net(), runtime, states=states)
        optimizer = tiermem.optim.Tiered(torch.optim.Adagrad, model.parameters(), lr=1e-2)
        take_step(model, optimizer, 0)


def _train(rank: int, size: int, stage: int) -> list[Any]:
    torch.set_num_threads(1)
    model = make_net()
    with tiermem.Runtime(
        {"stage": stage, "device": "cpu", "host_memory": 16 << 20, "pin_memory": False}
        | {"persistence_threshold_numel": 300}
    ) as runtime:
        tiermem.shard(model, runtime)
        optimizer = tiermem.optim.Tiered(torch.optim.NAdam, model.parameters(), lr=1e-2)
        for step in range(3):
            model(inputs(10 * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = copy.deepcopy(optimizer.state_dict())
        values = [tiermem.full_param(p).numpy() for p in model.parameters()]
    numbers = [float(saved["state"][i]["mu_product"]) for i in range(len(values))]
    return [values, [saved["state"][i]["exp_avg"].numpy() for i in range(len(values))], numbers]


def test_on_two_ranks_at_every_stage() -> None:
    """A rank that owns no element of a parameter counts its numbers too."""
    torch.manual_seed(0)
    model = make_net()
    their = torch.optim.NAdam(model.parameters(), lr=1e-2)
    for step in range(3):
        grads = []
        for rank in range(2):
            model.zero_grad()
            model(inputs(10 * step + rank)).square().mean().backward()
            grads.append([p.grad for p in model.parameters()])
        for param, a, b in zip(model.parameters(), *grads, strict=True):
            assert a is not None
            assert b is not None
            param.grad = (a + b) * 0.5
        their.step()
    numbers = [float(their.state[p]["mu_product"]) for p in model.parameters()]
    for stage in (0, 2, 3):
        for values, moments, found in run_ranks(_train, 2, stage):
            assert found == numbers
            for param, value, moment in zip(model.parameters(), values, moments, strict=True):
                assert torch.equal(torch.from_numpy(value), param.detach())
                assert torch.equal(torch.from_numpy(moment), their.state[param]["exp_avg"])
