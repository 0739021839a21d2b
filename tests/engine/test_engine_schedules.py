"""Schedules set DeepSpeed's numbers: tables computed by hand, from iteration -1 on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tiermem.engine import schedules
from tiermem.engine.schedules import make_schedule
from tiermem.errors import ConfigError, StateError

LOG3, LOG4 = math.log(3) / math.log(4), 1.0


def adamw(lr: Any = 0.4, groups: int = 1) -> torch.optim.Optimizer:
    params = [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)]
    return torch.optim.AdamW(params, lr=lr)


def rates(optimizer: torch.optim.Optimizer, schedule: Any, count: int) -> list[float]:
    """Those of the optimizer's first ``count`` steps."""
    found = []
    for _ in range(count):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


TABLES: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "warm-up, logarithmic": (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4},
        [0.1, 0.1, 0.1 + 0.4 * 0.5, 0.1 + 0.4 * LOG3, 0.5, 0.5, 0.5],
    ),
    "warm-up, linear": (
        "WarmupLR",
        {"warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.8],
    ),
    "warm-up to the optimizer's own rate": (
        "WarmupLR",
        {"warmup_num_steps": 2, "warmup_type": "linear"},
        [0.0, 0.0, 0.2, 0.4, 0.4],
    ),
    "warm-up of one iteration counts as two": (
        "WarmupLR",
        {"warmup_max_lr": 0.8, "warmup_num_steps": 1, "warmup_type": "linear"},
        [0.0, 0.0, 0.4, 0.8],
    ),
    "decay": (
        "WarmupDecayLR",
        {"total_num_steps": 6, "warmup_max_lr": 0.8, "warmup_num_steps": 2, "warmup_type": "linear"},
        [0.0, 0.0, 0.4, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0],
    ),
    "cosine": (
        "WarmupCosineLR",
        {
            "total_num_steps": 6,
            "warmup_min_ratio": 0.5,
            "warmup_num_steps": 2,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
        [
            0.0,
            0.4 * 0.5,
            0.4 * 0.75,
            0.4 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
            0.4 * (0.1 + 0.9 * 0.5),
            0.4 * (0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
            0.4 * 0.1,
            0.4 * 0.1,
        ],
    ),
    "range test": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0},
        [0.1, 0.25, 0.4, 0.55, 0.7],
    ),
    "range test in stairs": (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 0.1,
            "lr_range_test_step_size": 2,
            "lr_range_test_step_rate": 3.0,
            "lr_range_test_staircase": True,
        },
        [0.1, 0.1, 0.4, 0.4, 0.7, 0.7],
    ),
    "one cycle, then decay": (
        "OneCycle",
        {
            "cycle_min_lr": 0.2,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 2,
            "cycle_second_step_size": 4,
            "decay_lr_rate": 1.0,
            "decay_step_size": 2,
        },
        [0.2, 0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2 / 1.5, 0.2 / 2.0],
    ),
    "one cycle in stairs": (
        "OneCycle",
        {
            "cycle_min_lr": 0.2,
            "cycle_max_lr": 1.0,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
        },
        [0.2, 0.2, 0.6, 0.6, 1.0, 0.6, 0.6, 0.2, 0.2, 0.2, 0.2],
    ),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("tensor", [False, True])
def test_rates_are_those_of_the_table(name: str, tensor: bool) -> None:
    kind, params, expected = TABLES[name]
    optimizer = adamw(torch.tensor(0.4, dtype=torch.float64) if tensor else 0.4)
    schedule = make_schedule(kind, params, optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert rates(optimizer, schedule, len(expected)) == pytest.approx(expected)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == tensor


def test_momentum_goes_the_other_way() -> None:
    optimizer = adamw()
    schedule = schedules.OneCycle(
        optimizer,
        cycle_min_lr=0.1,
        cycle_max_lr=0.2,
        cycle_first_step_size=2,
        cycle_min_mom=0.5,
        cycle_max_mom=0.9,
        decay_mom_rate=0.1,
        decay_step_size=1,
    )
    found = []
    for _ in range(7):
        found.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        schedule.step()
    assert [beta2 for _, beta2 in found] == [0.99] * 7
    expected = [0.5, 0.7, 0.5, 0.7, 0.9, 0.9 * 1.1, 0.9 * 1.2]
    assert [beta1 for beta1, _ in found] == pytest.approx(expected)


def test_an_optimizer_without_betas_keeps_its_momentum(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.4, momentum=0.7)
    schedule = schedules.OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=2)
    assert rates(optimizer, schedule, 3) == pytest.approx([0.1, 0.15, 0.2])
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert "SGD has no betas" in caplog.text


def test_rates_by_parameter_group() -> None:
    optimizer = adamw(groups=2)
    schedule = schedules.WarmupLR(optimizer, 0.0, [0.2, 0.6], 2, "linear")
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.1, 0.3])
    with pytest.raises(ConfigError, match="warmup_max_lr has 3 values, the optimizer has 2"):
        schedules.WarmupLR(optimizer, 0.0, [0.2, 0.6, 0.7])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("resume", ["state", "state of DeepSpeed", "last_batch_iteration"])
def test_resumed_schedule_goes_on(name: str, resume: str) -> None:
    kind, params, expected = TABLES[name]
    optimizer = adamw()
    schedule = make_schedule(kind, params, optimizer)
    rates(optimizer, schedule, 3)
    saved, options = schedule.state_dict(), optimizer.state_dict()
    again = adamw()
    if resume == "last_batch_iteration":
        again.load_state_dict(options)
        resumed = make_schedule(kind, {**params, "last_batch_iteration": 2}, again)
    else:
        resumed = make_schedule(kind, params, again)
        if resume == "state of DeepSpeed":
            saved = {"last_batch_iteration": saved["last_batch_iteration"]}
        resumed.load_state_dict(saved)
    assert resumed.get_last_lr() == pytest.approx(expected[3:4])
    assert again.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    assert rates(again, resumed, len(expected) - 3) == pytest.approx(expected[3:])


def test_step_to_an_iteration() -> None:
    optimizer = adamw()
    schedule = schedules.WarmupLR(optimizer, 0.0, 0.8, 4, "linear")
    optimizer.step()
    schedule.step(3)
    assert schedule.last_batch_iteration == 3
    assert schedule.get_last_lr() == pytest.approx([0.6])


def test_torchs_schedulers_are_found() -> None:
    schedule = make_schedule("StepLR", {"step_size": 3}, adamw())
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmUpLR", {}, "did you mean 'WarmupLR'"),
        ("Optimizer", {}, "unknown"),
        ("WarmupLR", {"warmup_steps": 3}, "did you mean 'warmup_num_steps'"),
        ("WarmupDecayLR", {}, "'total_num_steps' is missing"),
        ("WarmupLR", {"warmup_type": "exponential"}, "it is 'log' or 'linear'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "a whole number above 0"),
        ("WarmupLR", {"last_batch_iteration": -2}, "at least -1"),
        ("StepLR", {"step_size": 3, "gama": 2}, "did you mean 'gamma'"),
        ("LambdaLR", {"lr_lambda": [1, 2]}, "LambdaLR"),
    ],
)
def test_mistakes_are_named(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(kind, params, adamw())


def test_the_state_of_something_else_is_refused() -> None:
    schedule = schedules.WarmupLR(adamw())
    with pytest.raises(StateError, match="last_batch_iteration"):
        schedule.load_state_dict({"last_epoch": 3})
    with pytest.raises(StateError, match="2 parameter groups, the optimizer has 1"):
        schedule.load_state_dict({"last_batch_iteration": 3, "base_lrs": [0.1, 0.2]})
