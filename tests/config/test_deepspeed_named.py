"""Optimizers and schedules: their names, their arguments, DeepSpeed's defaults."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_rig import problem, problems

from tiermem.config import NamedBlock, read_deepspeed
from tiermem.config.deepspeed_named import OPTIMIZERS, SCHEDULERS

ADAMW = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "maximize": False,
}
NEEDED: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {"total_num_steps": 1000},
    "WarmupCosineLR": {"total_num_steps": 1000},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3},
}


def optimizer(type_: str, **params: Any) -> NamedBlock:
    block = read_deepspeed({"optimizer": {"type": type_, "params": params}}).optimizer
    assert block is not None
    return block


def scheduler(type_: str, **params: Any) -> NamedBlock:
    block = read_deepspeed({"scheduler": {"type": type_, "params": params}}).scheduler
    assert block is not None
    return block


def test_no_block_makes_nothing() -> None:
    config = read_deepspeed({})
    assert config.optimizer is None
    assert config.scheduler is None
    assert read_deepspeed({"optimizer": {}, "scheduler": {"type": None}}) == config


def test_what_is_left_out_has_deepspeeds_defaults() -> None:
    """AdamW without weight_decay decays nothing in DeepSpeed; torch's own would."""
    assert optimizer("AdamW") == NamedBlock("AdamW", ADAMW)
    assert optimizer("adamw", torch_adam=True).params["weight_decay"] == 0.01
    assert optimizer("SGD") == NamedBlock(
        "SGD",
        {
            "lr": 1e-3,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
    )


def test_adam_is_adamw_unless_it_is_said_otherwise() -> None:
    assert optimizer("Adam").type == "AdamW"
    assert optimizer("Adam", adam_w_mode=True).type == "AdamW"
    assert optimizer("Adam", adam_w_mode=False) == NamedBlock("Adam", ADAMW)
    assert optimizer("AdamW", adam_w_mode=False).type == "AdamW"
    config = read_deepspeed({"optimizer": {"type": "Adam"}})
    assert any("Adam is AdamW" in note for note in config.notes)
    assert str(config.effective["optimizer.type"]) == '"AdamW" (given "Adam")'


def test_arguments_are_checked_and_passed() -> None:
    block = optimizer("AdamW", lr="2e-5", betas=[0.9, 0.95], eps=1e-6, weight_decay=0.1)
    assert block.params == ADAMW | {
        "lr": 2e-5,
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.1,
    }


def test_auto_has_the_default_and_is_listed() -> None:
    block = optimizer("AdamW", lr="auto", betas="auto", eps=1e-6)
    assert block == NamedBlock("AdamW", ADAMW | {"eps": 1e-6})
    rise = {"warmup_max_lr": "auto", "warmup_num_steps": 5}
    assert scheduler("WarmupLR", **rise) == NamedBlock("WarmupLR", {"warmup_num_steps": 5})
    config = read_deepspeed(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}},
            "scheduler": {"type": "WarmupLR", "params": rise},
        }
    )
    assert config.notes == (
        '"auto" stands for: optimizer.params.lr: 0.001; optimizer.params.betas: [0.9, 0.999]; '
        "scheduler.params.warmup_max_lr: the optimizer's",
    )


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"beta": 1}, "optimizer.params.beta: unknown key; did you mean 'betas'?"),
        ({"xyzzy": 1}, "optimizer.params.xyzzy: unknown key; valid: lr, betas"),
        ({"betas": 0.9}, "must be two numbers, for example [0.9, 0.999]; got 0.9"),
        ({"betas": [0.9, 1.0]}, "must be below 1; got 1.0"),
        ({"lr": "fast"}, "optimizer.params.lr: must be a number"),
        ({"lr": True}, "optimizer.params.lr: must be a number"),
        ({"amsgrad": True}, "amsgrad: true is refused: it would change the result"),
        ({"bias_correction": False}, "bias_correction: false is refused"),
        ({"momentum": 0.9}, "unknown key"),
    ],
)
def test_arguments_that_cannot_work(params: dict[str, Any], says: str) -> None:
    assert says in problem({"optimizer": {"type": "AdamW", "params": params}})


def test_arguments_of_other_implementations_have_no_effect() -> None:
    config = read_deepspeed({"optimizer": {"type": "AdamW", "params": {"fused": True}}})
    assert config.optimizer == NamedBlock("AdamW", ADAMW)
    assert config.notes == (
        "optimizer.params.fused: true has no effect here (updates run in tiermem's own kernels)",
    )


@pytest.mark.parametrize(
    "name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb", "Lion", "Muon", "MuAdam"]
)
def test_optimizers_that_are_not_built_are_refused_by_name(name: str) -> None:
    line = problem({"optimizer": {"type": name, "params": {"lr": 0.1, "whatever": 1}}})
    assert line == (
        f"optimizer.type: {name} is not built; these work: {', '.join(OPTIMIZERS)}; or pass an "
        f"optimizer of your own"
    )


@pytest.mark.parametrize(
    ("block", "name", "says"),
    [
        ("optimizer", "AdmW", "unknown type 'AdmW'; did you mean 'AdamW'?"),
        ("optimizer", "Adafactor", "these work: AdamW, Adam, SGD"),
        ("scheduler", "WarmUpDecay", "did you mean 'WarmupDecayLR'?"),
        ("scheduler", "StepLR", "these work: WarmupLR, WarmupDecayLR"),
    ],
)
def test_unknown_types_name_the_nearest(block: str, name: str, says: str) -> None:
    assert says in problem({block: {"type": name}})


def test_arguments_need_a_type() -> None:
    assert problems({"optimizer": {"params": {"lr": 1}}, "scheduler": {"params": {}}}) == [
        f"optimizer.type: missing; these work: {', '.join(OPTIMIZERS)}",
        f"scheduler.type: missing; these work: {', '.join(SCHEDULERS)}",
    ]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_takes_its_arguments(name: str) -> None:
    least = NEEDED.get(name, {})
    assert scheduler(name, **least) == NamedBlock(name, least)
    given = {
        key.last: least.get(key.last, 3 if key.default is None else key.default)
        for key in SCHEDULERS[name]
    }
    assert scheduler(name.lower(), **given) == NamedBlock(name, given)


@pytest.mark.parametrize(("name", "needed"), NEEDED.items())
def test_what_a_schedule_needs_cannot_be_left_out_nor_auto(name: str, needed: dict[str, Any]) -> None:
    for key in needed:
        others = {other: value for other, value in needed.items() if other != key}
        line = problem({"scheduler": {"type": name, "params": others}})
        assert line == f"scheduler.params.{key}: missing; {name} needs it"
        line = problem({"scheduler": {"type": name, "params": others | {key: "auto"}}})
        assert line.startswith(f'scheduler.params.{key}: "auto" cannot be known here; give ')


def test_total_num_steps_says_what_to_give() -> None:
    params = {"total_num_steps": "auto", "warmup_num_steps": "auto"}
    line = problem({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    assert line.endswith("give the number of steps")


def test_learning_rates_may_differ_by_parameter_group() -> None:
    assert scheduler("WarmupLR", warmup_max_lr=[0.1, "0.2"]).params == {"warmup_max_lr": [0.1, 0.2]}


def test_the_names_are_those_of_the_table() -> None:
    wrapped = ["Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop"]
    assert list(OPTIMIZERS) == ["AdamW", "Adam", "SGD", "AdamW8bit", "Adam8bit", *wrapped]
    for block, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        for keys in types.values():
            assert all(key.name.startswith(f"{block}.params.") for key in keys)
