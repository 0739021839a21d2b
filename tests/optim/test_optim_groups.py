"""Parameter groups with options of their own, added at any time; who may optimize what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optim_rig import PLACEMENTS, Net, assert_equal_to, make_net, sharded, take_step
from torch import nn

import tiermem
from tiermem.errors import ConfigError, StateError, TierMemError

OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-2, "weight_decay": 0.5},
    {"lr": 3e-3, "betas": (0.5, 0.9), "eps": 1e-4, "weight_decay": 0.0},
    {"maximize": True, "lr": 1e-4},
]


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    modules = [model.get_submodule(name) for name in ("first", "second", "branch")]
    return [
        {"params": list(module.parameters()), **options}
        for module, options in zip(modules, OPTIONS, strict=True)
    ]


def split_within_modules(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases of one unit with different options."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.3},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 1e-2},
    ]


@pytest.mark.parametrize("threshold", [0, 300, 100_000])
@pytest.mark.parametrize("groups", [three_groups, split_within_modules])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_groups_have_their_own_options(
    placement: str, groups: Any, threshold: int, tmp_path: Path
) -> None:
    theirs = make_net()
    their = torch.optim.AdamW(groups(theirs), fused=True)
    with sharded(tmp_path, placement, persistence_threshold_numel=threshold) as (_, ours):
        optimizer = tiermem.optim.AdamW(groups(ours))
        for step in range(4):
            assert take_step(ours, optimizer, step) == take_step(theirs, their, step)
        assert_equal_to(ours, theirs)


def test_defaults_fill_what_groups_leave_out(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(three_groups(model), lr=0.7, weight_decay=0.2, eps=1e-3)
        expected = torch.optim.AdamW(three_groups(make_net()), lr=0.7, weight_decay=0.2, eps=1e-3)
        for ours, theirs in zip(optimizer.param_groups, expected.param_groups, strict=True):
            for key in ("lr", "betas", "eps", "weight_decay", "maximize"):
                assert ours[key] == theirs[key]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_group_added_later_is_updated_from_then_on(placement: str, tmp_path: Path) -> None:
    theirs = make_net()
    with sharded(tmp_path, placement) as (_, ours):
        pair = []
        for model, make in ((theirs, torch.optim.AdamW), (ours, tiermem.optim.AdamW)):
            optimizer = make(
                [*model.first.parameters(), *model.second.parameters()],
                lr=1e-2,
                **({"fused": True} if make is torch.optim.AdamW else {}),
            )
            losses = []
            for step in range(4):
                if step == 2:
                    optimizer.zero_grad()
                    model.zero_grad()
                    optimizer.add_param_group(
                        {"params": list(model.branch.parameters()), "lr": 5e-3, "weight_decay": 0.4}
                    )
                losses.append(take_step(model, optimizer, step))
            pair.append(losses)
        assert pair[0] == pair[1]
        assert_equal_to(ours, theirs)


def test_a_generator_and_named_parameters_are_taken(tmp_path: Path) -> None:
    theirs = make_net()
    their = torch.optim.AdamW(theirs.named_parameters(), lr=1e-2, fused=True)
    with sharded(tmp_path) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.named_parameters(), lr=1e-2)
        take_step(theirs, their, 0)
        take_step(ours, optimizer, 0)
        assert_equal_to(ours, theirs)
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == [
            name for name, _ in theirs.named_parameters()
        ]


def test_a_parameter_in_no_group_is_left_alone(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        before = tiermem.full_param(model.second.weight)
        optimizer = tiermem.optim.AdamW(model.first.parameters(), lr=1e-2)
        for step in range(2):
            take_step(model, optimizer, step)
        assert torch.equal(tiermem.full_param(model.second.weight), before)


def _drop_first(optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    group["params"] = group["params"][1:]


def _delete_in_place(optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][2]


def _refill(optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": params[:3]})
    optimizer.add_param_group({"params": params[4:], "lr": 1e-3})


def _swap_groups(optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[:2]
    optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "params": params[2:], "lr": 0.1})


@pytest.mark.parametrize("change", [_drop_first, _delete_in_place, _refill, _swap_groups])
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_groups_that_the_user_changes_are_followed(change: Any, update: str, tmp_path: Path) -> None:
    """Small parameters of one unit share a buffer: only some of it is still to be updated."""
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    declared = {"update": update, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    with sharded(tmp_path, persistence_threshold_numel=1 << 20, **declared) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2)
        for model, each in ((theirs, their), (ours, optimizer)):
            take_step(model, each, 0)
            change(each)
            for step in range(1, 4):
                take_step(model, each, step)
        assert_equal_to(ours, theirs)


def test_a_parameter_put_into_a_group_by_hand_is_refused(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.first.parameters())
        take_step(model, optimizer, 0)
        optimizer.param_groups[0]["params"].append(model.second.weight)
        with pytest.raises(StateError, match=r"\(64, 256\).*add_param_group"):
            take_step(model, optimizer, 1)


def test_a_parameter_that_leaves_between_backward_and_step(tmp_path: Path) -> None:
    with sharded(tmp_path, update="backward") as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).square().mean().backward()
        _drop_first(optimizer)
        with pytest.raises(StateError, match="between backward and step"):
            optimizer.step()


def test_a_part_of_a_unit_may_be_left_out(tmp_path: Path) -> None:
    """Its other parameters share the unit's buffer."""
    theirs = make_net()
    their = torch.optim.AdamW([theirs.first.weight], lr=1e-2, fused=True)
    with sharded(tmp_path, persistence_threshold_numel=0) as (_, ours):
        optimizer = tiermem.optim.AdamW([ours.first.weight], lr=1e-2)
        for step in range(3):
            take_step(theirs, their, step)
            take_step(ours, optimizer, step)
        assert_equal_to(ours, theirs)


def test_the_same_parameter_twice_is_refused(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.first.parameters())
        with pytest.raises((ValueError, TierMemError)):
            optimizer.add_param_group({"params": list(model.first.parameters())})
        take_step(model, optimizer, 0)


def test_two_optimizers_on_one_unit_are_refused_with_its_name(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        first = tiermem.optim.AdamW(model.first.parameters())
        with pytest.raises(StateError, match=r"first.*optimizer already"):
            tiermem.optim.AdamW(model.parameters())
        second = tiermem.optim.AdamW([*model.second.parameters(), *model.branch.parameters()])
        for step in range(2):
            take_step(model, first, step)
            take_step(model, second, step)


def test_two_optimizers_on_different_units_work_as_in_torch(tmp_path: Path) -> None:
    def run(model: Any, make: Any) -> None:
        first = make(model.first.parameters(), lr=1e-2)
        rest = make([*model.second.parameters(), *model.branch.parameters()], lr=1e-3)
        for _ in range(3):
            model(torch.ones(2, 64)).square().mean().backward()
            for optimizer in (first, rest):
                optimizer.step()
            for optimizer in (first, rest):
                optimizer.zero_grad()

    theirs = make_net()
    run(theirs, lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True))
    with sharded(tmp_path, "nvme") as (_, ours):
        run(ours, tiermem.optim.AdamW)
        assert_equal_to(ours, theirs)


def test_parameters_that_are_not_sharded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"shard.*torch\.optim\.AdamW"):
        tiermem.optim.AdamW(make_net().parameters())
    with sharded(tmp_path) as (_, model), pytest.raises(StateError, match="shard"):
        tiermem.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])


def test_parameters_collected_before_shard_are_told_apart(tmp_path: Path) -> None:
    with sharded(tmp_path) as (runtime, _):
        model = make_net()
        params = list(model.parameters())
        tiermem.shard(model, runtime)
        with pytest.raises(StateError, match=r"model\.parameters\(\) taken after.*before shard\(\)"):
            tiermem.optim.AdamW(params)
        tiermem.optim.AdamW(model.parameters())


def test_parameters_of_two_runtimes_are_refused(tmp_path: Path) -> None:
    with (
        sharded(tmp_path) as (_, one),
        sharded(tmp_path) as (_, two),
        pytest.raises(StateError, match="runtime"),
    ):
        tiermem.optim.AdamW([*one.parameters(), *two.parameters()])


def test_two_models_on_one_runtime_share_an_optimizer(tmp_path: Path) -> None:
    theirs = [make_net(0), make_net(1)]
    their = torch.optim.AdamW([p for m in theirs for p in m.parameters()], lr=1e-2, fused=True)
    with sharded(tmp_path) as (runtime, first):
        ours = [first, tiermem.shard(make_net(1), runtime)]
        optimizer = tiermem.optim.AdamW([p for m in ours for p in m.parameters()], lr=1e-2)
        for step in range(3):
            for models, opt in ((theirs, their), (ours, optimizer)):
                x = torch.full((2, 64), 0.1 * step)
                models[1](models[0](x)).square().mean().backward()
                opt.step()
                opt.zero_grad()
        for mine, expected in zip(ours, theirs, strict=True):
            assert_equal_to(mine, expected)


@pytest.mark.parametrize("params", [[], torch.ones(3), [1, 2], None])
def test_what_is_no_parameters_is_refused(params: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError, TierMemError)):
        tiermem.optim.AdamW(params)


WRONG: list[dict[str, Any]] = [
    {"lr": -1.0},
    {"lr": float("nan")},
    {"betas": (-0.1, 0.9)},
    {"betas": (0.9, 1.0)},
    {"eps": -1e-8},
    {"weight_decay": -0.1},
    {"betas": (0.9, float("nan"))},
    {"lr": torch.tensor(-1.0)},
    {"lr": torch.ones(2)},
    {"lr": "1e-3"},
    {"lr": "a"},
    {"lr": None},
    {"lr": True},
    {"lr": float("inf")},
    {"lr": torch.tensor(1j)},
    {"lr": torch.tensor(float("nan"))},
    {"eps": None},
    {"eps": float("nan")},
    {"eps": [1e-8]},
    {"weight_decay": float("nan")},
    {"weight_decay": "0.1"},
    {"betas": (0.9,)},
    {"betas": (0.9, 0.99, 0.999)},
    {"betas": 0.9},
    {"betas": None},
    {"betas": "09"},
    {"betas": (0.9, "0.999")},
    {"betas": (None, 0.999)},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_hyperparameters_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    ((key, value),) = options.items()
    with sharded(tmp_path) as (_, model):
        with pytest.raises(ConfigError, match=key):
            tiermem.optim.AdamW(model.parameters(), **options)
        # In a group too, and the refusals leave everything as it was.
        with pytest.raises(ConfigError, match=key):
            tiermem.optim.AdamW([{"params": list(model.parameters()), key: value}])
        optimizer = tiermem.optim.AdamW(model.first.parameters())
        with pytest.raises(ConfigError, match=key):
            optimizer.add_param_group({"params": list(model.second.parameters()), key: value})
        state = optimizer.state_dict()
        state["param_groups"][0][key] = value
        with pytest.raises(ConfigError, match=key):
            optimizer.load_state_dict(state)
        take_step(model, optimizer, 0)
        assert (
            optimizer.param_groups[0][key]
            == tiermem.optim.AdamW(model.branch.parameters()).defaults[key]
        )


@pytest.mark.parametrize(
    "options",
    [
        {"lr": torch.tensor([1e-2])},
        {"lr": np.float32(1e-2), "eps": np.float64(1e-8)},
        {"lr": 0, "weight_decay": 0, "eps": 0},
        {"betas": [0.9, 0.99]},
    ],
    ids=str,
)
def test_every_kind_of_number_is_taken(options: dict[str, Any], tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        take_step(model, tiermem.optim.AdamW(model.parameters(), **options), 0)


def test_a_refused_group_is_not_added(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.first.parameters())
        with pytest.raises(ConfigError, match="eps"):
            optimizer.add_param_group({"params": list(model.second.parameters()), "eps": -1.0})
        with pytest.raises(StateError, match="shard"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": list(model.second.parameters())})
        assert len(optimizer.param_groups) == 2
        take_step(model, optimizer, 0)


def test_amsgrad_is_refused(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        with pytest.raises(ConfigError, match="amsgrad"):
            tiermem.optim.AdamW(model.parameters(), amsgrad=True)
        with pytest.raises(ConfigError, match="amsgrad"):
            tiermem.optim.AdamW([{"params": list(model.parameters()), "amsgrad": True}])


def test_it_is_a_torch_optimizer(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert "lr: 0.001" in repr(optimizer)
        assert optimizer.defaults["weight_decay"] == 1e-2
        assert isinstance(model, Net)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_frozen_parameters_get_no_state_and_do_not_move(
    name: str, placement: str, tmp_path: Path
) -> None:
    theirs = make_net()
    theirs.second.get_parameter(name).requires_grad_(False)
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    with sharded(tmp_path, placement) as (_, ours):
        ours.second.get_parameter(name).requires_grad_(False)
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2)
        for step in range(3):
            assert take_step(ours, optimizer, step) == take_step(theirs, their, step)
        assert_equal_to(ours, theirs)
        assert len(optimizer.state) == len(their.state) == 5
