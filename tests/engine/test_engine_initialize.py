"""`initialize`: which optimizer, parameters and schedule count, and what is refused."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import (
    assert_equal_to,
    batch,
    config,
    engine_of,
    loss_of,
    make_net,
    micro_step,
    plain_step,
)
from torch import nn

import tiermem
from tiermem.engine.settings import on_device
from tiermem.errors import ConfigError, StateError


def test_an_optimizer_made_before() -> None:
    theirs, model = make_net(), make_net()
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=1e-1, momentum=0.9, fused=True) for m in (theirs, model)
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    given = {"optimizer": optimizers[1], "lr_scheduler": schedules[1]}
    engine, optimizer, _, schedule = tiermem.initialize(
        model=model, config=config(optimizer=None), **given
    )
    with engine:
        assert isinstance(optimizer, tiermem.optim.SGD)
        assert schedule is schedules[1]
        for step in range(3):
            assert [micro_step(engine, step)] == plain_step(theirs, optimizers[0], [step], schedules[0])
        assert_equal_to(model, theirs)


def test_functions_that_make_them() -> None:
    theirs, model = make_net(), make_net()
    their = torch.optim.RMSprop(theirs.parameters(), lr=1e-3)
    engine, *_ = tiermem.initialize(
        model=model,
        config=config(optimizer=None),
        optimizer=lambda params: tiermem.optim.Tiered(torch.optim.RMSprop, params, lr=1e-3),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.ConstantLR(made, 1.0),
    )
    with engine:
        for step in range(2):
            assert [micro_step(engine, step)] == plain_step(theirs, their, [step])
        assert_equal_to(model, theirs)


def test_parameters_collected_before(recwarn: pytest.WarningsRecorder) -> None:
    """With groups of their own, as DeepSpeed's examples make them."""
    theirs, model = make_net(), make_net()

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        named = list(of.named_parameters())
        return [
            {"params": (p for n, p in named if "bias" not in n), "weight_decay": 0.1},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
        ]

    their = torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True)
    with engine_of(config(), model, model_parameters=groups(model)) as engine:
        for step in range(2):
            assert [micro_step(engine, step)] == plain_step(theirs, their, [step])
        assert_equal_to(model, theirs)
    assert not [w for w in recwarn if "collected before" in str(w.message)]


def test_only_some_parameters_are_trained() -> None:
    model = make_net()
    before = model[0].weight.detach().clone()
    with engine_of(config(), model, model_parameters=model[2].parameters()) as engine:
        micro_step(engine, 0)
        assert torch.equal(tiermem.full_param(model[0].weight), before)
        assert len(engine.optimizer.param_groups[0]["params"]) == 2


def test_a_model_without_an_optimizer_only_computes() -> None:
    model = make_net().requires_grad_(False)
    expected = make_net()(batch(0))
    with engine_of(config(), model) as engine:
        assert engine.optimizer is None
        assert torch.equal(engine(batch(0)), expected)
        with pytest.raises(StateError, match="needs an optimizer, and this engine has none"):
            engine.step()


def test_two_engines_share_one_runtime() -> None:
    budgets = {"host_memory": "32MiB", "device_memory": "1MiB"}
    with tiermem.Runtime({"device": "cpu", "pin_memory": False, **budgets}) as runtime:
        policy, reference = make_net(), make_net(1).requires_grad_(False)
        expected = reference(batch(0))
        first, *_ = tiermem.initialize(model=policy, config=config(), runtime=runtime)
        second, *_ = tiermem.initialize(model=reference, config=config(), runtime=runtime)
        assert torch.equal(second(batch(0)), expected)
        micro_step(first, 0)
        second.close()
        micro_step(first, 1)
        assert torch.equal(second(batch(0)), expected)


def test_the_configuration_may_come_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    parser = tiermem.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    engine, *_ = tiermem.initialize(args=args, model=make_net())
    with engine:
        micro_step(engine, 0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"config": None}, ConfigError, "takes one configuration, not 0"),
        ({"config_params": config()}, ConfigError, "takes one configuration, not 2"),
        ({"model": None}, TypeError, "not a NoneType"),
        ({"mpu": object()}, ConfigError, "mesh=device_mesh"),
        ({"config": {"zero_optimization": {"stage": 7}}}, ConfigError, "zero_optimization.stage"),
        (
            {"config": config(train_batch_size=6)},
            ConfigError,
            "do not fit 1 rank: train_batch_size 6, train_micro_batch_size_per_gpu 4",
        ),
        (
            {"optimizer": torch.optim.Adafactor([nn.Parameter(torch.ones(1))])},
            ConfigError,
            "Adafactor cannot run sharded",
        ),
        (
            {"optimizer": lambda params: torch.optim.SGD([nn.Parameter(torch.ones(1))])},
            ConfigError,
            r"torch\.optim\.sgd\.SGD, which cannot update sharded parameters",
        ),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
            StateError,
            "is not a parameter of the model",
        ),
        (
            {"config": config(optimizer=None), "lr_scheduler": lambda optimizer: None},
            StateError,
            "schedule and no optimizer",
        ),
    ],
)
def test_what_cannot_work(given: dict[str, Any], error: type, message: str) -> None:
    arguments = {"model": make_net(), "config": config(), **given}
    with pytest.raises(error, match=message):
        tiermem.initialize(**arguments)


def test_an_optimizer_over_a_sharded_model_is_refused() -> None:
    with tiermem.Runtime({"device": "cpu", "host_memory": "16MiB", "pin_memory": False}) as runtime:
        model = tiermem.shard(make_net(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        with pytest.raises(ConfigError, match=r"lambda params: tiermem\.optim\.AdamW\(params"):
            tiermem.initialize(model=make_net(), optimizer=optimizer, config=config())


_SCRIPT = """
import sys, tiermem
sys.path.insert(0, {rig!r})
from engine_rig import *
zero = {{"stage": 3, "offload_param": {{"device": "nvme", "nvme_path": {path!r}}},
        "offload_optimizer": {{"device": "nvme", "nvme_path": {path!r}}}}}
engine, *_ = tiermem.initialize(model=make_net(), config=config(zero_optimization=zero))
for step in range(3):
    micro_step(engine, step)
import os
print(len(os.listdir({path!r})))
"""


def test_a_program_that_never_closes_leaves_nothing(tmp_path: Path) -> None:
    """As programs for DeepSpeed are written: the process just ends."""
    script = _SCRIPT.format(rig=str(Path(__file__).parent), path=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_failing_block_closes_and_raises() -> None:
    with pytest.raises(ZeroDivisionError), engine_of(config()) as engine:
        loss_of(engine, 0)
        raise ZeroDivisionError
    with pytest.raises(StateError, match="closed"):
        engine(batch(0))


def test_leaf_modules_of_the_configuration_are_gathered_whole() -> None:
    def units(**leaves: Any) -> set[str]:
        torch.manual_seed(0)
        experts = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)]
        model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(*experts))
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "leaf_module": leaves}
        with engine_of(config(zero_optimization=zero), model) as engine:
            micro_step(engine, 0)
            return {group.name for group in engine.runtime.groups}

    assert units(names=["1"]) == {"0", "1"}
    assert units(name_suffixes=["1.0", "1.1"]) == {"0", "1.0", "1.1"}
    with pytest.raises(ConfigError, match="'experts' is no name"):
        units(names=["experts"])


def test_states_that_would_stay_on_an_accelerator_lie_on_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = tiermem.TierConfig(optimizer="device")
    assert on_device(tier, "cpu") is tier
    with caplog.at_level(logging.WARNING, "tiermem.engine"):
        assert on_device(tier, "cuda").optimizer == "host"
    assert "lie in host memory all the same" in caplog.text
    elsewhere = tiermem.TierConfig(optimizer="nvme", paths=("/x",))
    assert on_device(elsewhere, "cuda") is elsewhere


def test_what_the_configuration_does_is_said(caplog: pytest.LogCaptureFixture) -> None:
    settings = config(wall_clock_breakdown=True)
    with caplog.at_level(logging.INFO, "tiermem.engine"), engine_of(settings):
        pass
    assert "wall_clock_breakdown: true has no effect here" in caplog.text
    assert 'optimizer.type acts as "AdamW"' in caplog.text


def test_a_frozen_model_needs_no_schedule() -> None:
    """One configuration for a policy and its reference."""
    both = config(scheduler={"type": "WarmupLR", "params": {}})
    with engine_of(both, make_net().requires_grad_(False)) as engine:
        assert engine.optimizer is engine.lr_scheduler is None
        engine(batch(0))


def _adamw(**params: Any) -> dict[str, Any]:
    return config(optimizer={"type": "AdamW", "params": params})


def _of_another() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1)


NESTEROV = config(optimizer={"type": "SGD", "params": {"nesterov": True}})
THREE_RATES = config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2, 3]}})
NO_OPTIMIZER = config(optimizer=None, scheduler={"type": "WarmupLR", "params": {}})
BF16_SUMS = config(data_types={"grad_accum_dtype": "bf16"})
UNTOUCHED: list[tuple[dict[str, Any], type, str]] = [
    ({"config": _adamw(betas=[0.9, 1.0])}, ConfigError, "below 1"),
    ({"config": NESTEROV}, ConfigError, "nesterov"),
    ({"config": THREE_RATES}, ConfigError, "warmup_max_lr"),
    ({"config": NO_OPTIMIZER}, StateError, "schedule and no optimizer"),
    ({"config": BF16_SUMS}, ConfigError, "grad_accum_dtype is 'bf16'"),
    ({"model_parameters": [nn.Parameter(torch.ones(1))]}, StateError, "not a parameter of"),
    ({"training_data": 5}, TypeError, "int"),
    ({"lr_scheduler": _of_another()}, StateError, "StepLR of another optimizer than the one given"),
]


@pytest.mark.parametrize(("given", "error", "message"), UNTOUCHED)
def test_what_can_be_found_is_found_before_the_model_is_touched(
    given: dict[str, Any], error: type, message: str
) -> None:
    model = make_net()
    with pytest.raises(error, match=message):
        tiermem.initialize(**{"model": model, "config": config(), **given})
    with engine_of(config(), model) as engine:  # as it was
        micro_step(engine, 0)


def test_a_class_of_schedules() -> None:
    with engine_of(config(), lr_scheduler=torch.optim.lr_scheduler.ConstantLR) as engine:
        micro_step(engine, 0)
        assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.ConstantLR)


@pytest.mark.parametrize(
    ("dtype", "block", "expected"),
    [
        (torch.float16, {}, (True, False)),
        (torch.bfloat16, {}, (False, True)),
        (torch.float32, {"bf16": {"enabled": True}}, (False, True)),
        (torch.bfloat16, {"bf16": {"enabled": False}}, (False, False)),
    ],
)
def test_precision_is_that_of_the_parameters(
    dtype: Any, block: Any, expected: tuple[bool, bool]
) -> None:
    with engine_of(config(**block), make_net(dtype=dtype)) as engine:
        assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == expected
        assert (engine.loss_scale > 1) == expected[0]


def test_what_was_saved_goes_on_with_its_schedule() -> None:
    """As README says."""
    both = config(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})
    with engine_of(both) as first:
        for step in range(3):
            micro_step(first, step)
        state = copy.deepcopy(
            {
                "model": first.module.state_dict(),
                "optimizer": copy.deepcopy(first.optimizer.state_dict()),
                "schedule": first.lr_scheduler.state_dict(),
                "steps": first.global_steps,
            }
        )
        expected = [micro_step(first, step) for step in range(3, 6)]
    with engine_of(both, make_net(1)) as second:
        second.module.load_state_dict(state["model"])
        second.optimizer.load_state_dict(state["optimizer"])
        second.lr_scheduler.load_state_dict(state["schedule"])
        second.global_steps = state["steps"]
        assert [micro_step(second, step) for step in range(3, 6)] == expected
        assert second.global_steps == 6
        assert second.get_lr() == first.get_lr()
