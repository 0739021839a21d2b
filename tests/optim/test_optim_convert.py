"""An optimizer made for the model before it was sharded goes on over tiers: options, groups, state,
and the schedule that was made for it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from optim_rig import assert_equal_to, make_net, take_step
from third_party import Factor, Lamb, Lion, ManyOptions
from torch import nn

import tiermem
from tiermem.errors import ConfigError, StateError
from tiermem.optim import SGD, Adam, AdamW, Tiered, convert
from tiermem.optim.convert import states_for

CASES: list[tuple[Any, dict[str, Any], type]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True}, AdamW),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}, Adam),
    (torch.optim.Adam, {"lr": 1e-2, "decoupled_weight_decay": True, "fused": True}, AdamW),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": True}, SGD),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}, Tiered),
    (torch.optim.RMSprop, {"lr": 1e-3}, Tiered),
    (Lion, {"lr": 1e-3}, Tiered),
    (ManyOptions, {"lr": 1e-2, "momentum": 0.9}, Tiered),
]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": list(model.get_submodule("first").parameters()), "lr": 3e-3},
        {"params": [*model.second.parameters(), *model.branch.parameters()]},  # type: ignore[union-attr]
    ]


def shard_as_before(model: nn.Module, optimizer: Any, runtime: tiermem.Runtime) -> Any:
    """What `tiermem.initialize` does."""
    before = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiermem.shard(model, runtime, states=states_for(optimizer))
    now = dict(model.named_parameters())
    by_id = {id(param): now[name] for name, param in before.items()}
    return convert(optimizer, lambda param: by_id[id(param)], runtime)


CONFIG = {"device": "cpu", "host_memory": "16MiB", "pin_memory": False}


@pytest.mark.parametrize(("kind", "options", "becomes"), CASES)
def test_it_goes_on_where_it_was(kind: Any, options: Any, becomes: type) -> None:
    theirs, ours = make_net(), make_net()
    their, mine = kind(groups_of(theirs), **options), kind(groups_of(ours), **options)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (their, mine)]
    for step in range(3):
        for model, optimizer, schedule in zip((theirs, ours), (their, mine), schedules, strict=True):
            take_step(model, optimizer, step)
            schedule.step()
    with tiermem.Runtime(CONFIG) as runtime:
        optimizer = shard_as_before(ours, mine, runtime)
        assert type(optimizer) is becomes
        for step in range(3, 7):
            assert take_step(ours, optimizer, step) == take_step(theirs, their, step)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch warns of schedules that run ahead of steps
                for schedule in schedules:
                    schedule.step()
            assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in their.param_groups]
        assert_equal_to(ours, theirs)


def test_the_old_one_does_not_train_silently() -> None:
    model = make_net()
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tiermem.Runtime(CONFIG) as runtime:
        optimizer = shard_as_before(model, old, runtime)
        model(torch.ones(1, 64)).sum().backward()
        with pytest.raises(StateError):
            old.step()
        optimizer.step()


def test_one_that_couples_elements_is_refused_before_anything_is_sharded() -> None:
    model = make_net()
    optimizer = Lamb(model.parameters())
    with pytest.raises(ConfigError, match="Lamb cannot run sharded"):
        states_for(optimizer)


def test_step_hooks_go_on() -> None:
    theirs, ours = make_net(), make_net()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (theirs, ours)]
    calls: list[object] = []

    def halve(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    for each in optimizers:
        each.register_step_pre_hook(halve)
        each.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    with tiermem.Runtime(CONFIG) as runtime:
        optimizer = shard_as_before(ours, optimizers[1], runtime)
        for step in range(3):
            assert take_step(ours, optimizer, step) == take_step(theirs, optimizers[0], step)
        assert calls == [optimizer, optimizers[0]] * 3
        assert_equal_to(ours, theirs)


def test_groups_with_their_own_kind_of_decay() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, second = groups_of(model)
        return [{**first, "decoupled_weight_decay": True}, second]

    theirs, ours = make_net(), make_net()
    their, mine = (torch.optim.Adam(groups(m), lr=1e-2, weight_decay=0.5) for m in (theirs, ours))
    with tiermem.Runtime(CONFIG) as runtime:
        optimizer = shard_as_before(ours, mine, runtime)
        for step in range(3):
            assert take_step(ours, optimizer, step) == take_step(theirs, their, step)
        assert_equal_to(ours, theirs)


def test_what_nobody_can_tell_is_refused() -> None:
    model = make_net()
    with pytest.raises(ConfigError, match="Factor was made with factor, which it does not keep"):
        states_for(Factor(model.parameters(), factor=0.1))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match=r"has a step\(\) of its own"):
        states_for(optimizer)


def test_every_optimizer_of_torch_says_how_it_was_made() -> None:
    for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"):
        states_for(getattr(torch.optim, name)(make_net().parameters(), lr=0.5))
