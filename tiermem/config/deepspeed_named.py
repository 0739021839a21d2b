"""The blocks ``optimizer`` and ``scheduler``: a type by name, and its arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiermem.config.deepspeed_key import Key, Kind, Role, no_op, refused
from tiermem.config.deepspeed_keys import TABLE
from tiermem.config.deepspeed_reading import Reading
from tiermem.config.deepspeed_value import shown

_CHANGES = "it would change the result and is not built; leave it out"
_OWN_KERNELS = "updates run in tiermem's own kernels"
_OF_THE_OPTIMIZER = "the optimizer's"


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """What to make: its type, and arguments that can be passed as they are."""

    type: str
    params: Mapping[str, Any]


def _param(block: str, name: str, kind: Kind, default: Any, meaning: str, **more: Any) -> Key:
    usual: dict[str, Any] = {"auto": _OF_THE_OPTIMIZER if default is None else shown(default)}
    name = f"{block}.params.{name}"
    return Key(name, kind, default, Role.ACTS, meaning, "the same", **(usual | more))


_LR = _param("optimizer", "lr", "number", 1e-3, "learning rate")
_BETAS = _param("optimizer", "betas", "pair", (0.9, 0.999), "decay of the moments", below=1)
_EPS = _param("optimizer", "eps", "number", 1e-8, "added to the divisor")
_WEIGHT_DECAY = _param("optimizer", "weight_decay", "number", 0.0, "decay of parameters")
_MAXIMIZE = _param("optimizer", "maximize", "bool", False, "go up, not down")
_TORCH = tuple(
    no_op(f"optimizer.params.{name}", False, "of torch's implementations", _OWN_KERNELS)
    for name in ("fused", "foreach", "capturable", "differentiable")
)
_ADAM = (
    _LR,
    _BETAS,
    _EPS,
    _WEIGHT_DECAY,
    _MAXIMIZE,
    no_op("optimizer.params.torch_adam", False, "torch's Adam or DeepSpeed's", _OWN_KERNELS),
    Key(
        "optimizer.params.adam_w_mode",
        "bool",
        True,
        Role.ACTS,
        "decay parameters (true) or add to gradients (false); for the type Adam",
        "chooses between AdamW and Adam",
        auto="true",
    ),
    refused("optimizer.params.bias_correction", True, "correct the moments' start", _CHANGES),
    refused("optimizer.params.amsgrad", False, "keep the largest second moment", _CHANGES),
    refused("optimizer.params.fp32_optimizer_states", True, "moments in fp32", _CHANGES),
    no_op("optimizer.params.set_grad_none", True, "drop gradients, or fill them", "they are dropped"),
    *_TORCH,
)
_ADAM_8BIT = tuple(key for key in _ADAM if key.last not in ("torch_adam", "adam_w_mode"))
"""tiermem's own; DeepSpeed has none."""

_SGD = (
    _LR,
    _param("optimizer", "momentum", "number", 0.0, "share of the last step"),
    _param("optimizer", "dampening", "number", 0.0, "of the gradient in it"),
    _WEIGHT_DECAY,
    _param("optimizer", "nesterov", "bool", False, "Nesterov's momentum"),
    _MAXIMIZE,
    *_TORCH,
)
_OF_ALL = (_WEIGHT_DECAY, _MAXIMIZE, *_TORCH)


def _lr(default: float) -> Key:
    return _param("optimizer", "lr", "number", default, "learning rate")


_WRAPPED: Mapping[str, tuple[Key, ...]] = {
    "Adagrad": (
        _lr(1e-2),
        _param("optimizer", "lr_decay", "number", 0.0, "decay of the learning rate"),
        _param("optimizer", "initial_accumulator_value", "number", 0.0, "where the sum starts"),
        _param("optimizer", "eps", "number", 1e-10, "added to the divisor"),
        *_OF_ALL,
    ),
    "Adadelta": (
        _lr(1.0),
        _param("optimizer", "rho", "number", 0.9, "decay of the means", below=1),
        _param("optimizer", "eps", "number", 1e-6, "added to the divisor"),
        *_OF_ALL,
    ),
    "Adamax": (_lr(2e-3), _BETAS, _EPS, *_OF_ALL),
    "NAdam": (
        _lr(2e-3),
        _BETAS,
        _EPS,
        _param("optimizer", "momentum_decay", "number", 4e-3, "decay of momentum"),
        _param("optimizer", "decoupled_weight_decay", "bool", False, "decay parameters, not gradients"),
        *_OF_ALL,
    ),
    "RAdam": (
        _LR,
        _BETAS,
        _EPS,
        _param("optimizer", "decoupled_weight_decay", "bool", False, "decay parameters, not gradients"),
        *_OF_ALL,
    ),
    "RMSprop": (
        _lr(1e-2),
        _param("optimizer", "alpha", "number", 0.99, "decay of the mean", below=1),
        _EPS,
        _param("optimizer", "momentum", "number", 0.0, "share of the last step"),
        _param("optimizer", "centered", "bool", False, "divide by the variance"),
        *_OF_ALL,
    ),
}
"""Torch's own that `tiermem.optim.Tiered` runs, with torch's arguments and defaults."""

OPTIMIZERS: Mapping[str, tuple[Key, ...]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "SGD": _SGD,
    "AdamW8bit": _ADAM_8BIT,
    "Adam8bit": _ADAM_8BIT,
    **_WRAPPED,
}

_REFUSED_OPTIMIZERS = (
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
    "Lamb",
    "Lion",
    "Muon",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
)


def _of_schedule(name: str, kind: Kind, default: Any, meaning: str, **more: Any) -> Key:
    return _param("scheduler", name, kind, default, meaning, **more)


_TOTAL = _of_schedule(
    "total_num_steps",
    "int",
    None,
    "steps of the whole training",
    auto=None,
    no_auto="give the number of steps",
    low=1,
    example=10_000,
)
_LAST = _of_schedule(
    "last_batch_iteration", "int", -1, "the step that was done last, to go on from", low=-1
)
_WARMUP_STEPS = _of_schedule("warmup_num_steps", "int", 1000, "steps of the rise; 2 at least")
_WARMUP_TYPE = _of_schedule("warmup_type", "choice", "log", "how it rises", choices=("log", "linear"))
_WARMUP = (
    _of_schedule("warmup_min_lr", "numbers", 0.0, "learning rate at the start"),
    _of_schedule("warmup_max_lr", "numbers", None, "learning rate after the rise"),
    _WARMUP_STEPS,
    _WARMUP_TYPE,
    _LAST,
)
SCHEDULERS: Mapping[str, tuple[Key, ...]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (_TOTAL, *_WARMUP),
    "WarmupCosineLR": (
        _TOTAL,
        _of_schedule("warmup_min_ratio", "number", 0.0, "of the learning rate, at the start"),
        _WARMUP_STEPS,
        _of_schedule("cos_min_ratio", "number", 1e-4, "of the learning rate, at the end"),
        _WARMUP_TYPE,
        _LAST,
    ),
    "OneCycle": (
        _of_schedule("cycle_min_lr", "number", None, "lowest learning rate", auto=None, example=1e-4),
        _of_schedule("cycle_max_lr", "number", None, "highest learning rate", auto=None, example=1e-3),
        _of_schedule("decay_lr_rate", "number", 0.0, "decay of it after the cycle"),
        _of_schedule("cycle_first_step_size", "int", 2000, "steps of the rise", low=1),
        _of_schedule("cycle_second_step_size", "int", None, "steps of the fall", auto="as many", low=1),
        _of_schedule("cycle_first_stair_count", "int", 0, "stairs of the rise; 0: none"),
        _of_schedule("cycle_second_stair_count", "int", None, "stairs of the fall", auto="as many"),
        _of_schedule("decay_step_size", "int", 0, "steps between decays; 0: no decay"),
        _of_schedule("cycle_momentum", "bool", True, "turn momentum the other way"),
        _of_schedule("cycle_min_mom", "number", 0.8, "lowest momentum"),
        _of_schedule("cycle_max_mom", "number", 0.9, "highest momentum"),
        _of_schedule("decay_mom_rate", "number", 0.0, "decay of momentum after the cycle"),
        _LAST,
    ),
    "LRRangeTest": (
        _of_schedule("lr_range_test_min_lr", "numbers", 1e-3, "learning rate at the start"),
        _of_schedule("lr_range_test_step_size", "int", 2000, "steps between rises", low=1),
        _of_schedule("lr_range_test_step_rate", "number", 1.0, "size of a rise"),
        _of_schedule("lr_range_test_staircase", "bool", False, "rise in stairs"),
        _LAST,
    ),
}
_NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}


def read_optimizer(reading: Reading) -> NamedBlock | None:
    """The optimizer, with DeepSpeed's defaults for what was not given; notes problems.

    ``max_grad_norm`` among its arguments was clipping for fp16 in DeepSpeed once; it counts as
    ``gradient_clipping``.
    """
    name = _type_of(reading, "optimizer", OPTIMIZERS)
    raw = dict(reading.of("optimizer.params", {}))
    norm = raw.pop("max_grad_norm", None)
    if norm is not None:
        spelling = "optimizer.params.max_grad_norm"
        reading.notes.append(f"{spelling} is an old name of gradient_clipping")
        reading.take(TABLE.keys["gradient_clipping"], spelling, norm)
    if name is None:
        return None
    params = _read_params(reading, OPTIMIZERS[name], raw, "optimizer")
    values = {key.last: params.get(key.last, key.default) for key in OPTIMIZERS[name]}
    if values.get("torch_adam") and name == "AdamW" and "weight_decay" not in params:
        values["weight_decay"] = 0.01  # torch's default; DeepSpeed's own is 0
    if name == "Adam" and values["adam_w_mode"]:
        name = "AdamW"
        reading.notes.append(
            "optimizer.type: Adam is AdamW, as in DeepSpeed; adam_w_mode: false makes it Adam"
        )
    passed = {
        key.last: values[key.last]
        for key in OPTIMIZERS[name]
        if key.role is Role.ACTS and key.last != "adam_w_mode"
    }
    return NamedBlock(name, passed)


def read_scheduler(reading: Reading) -> NamedBlock | None:
    """The schedule, with the arguments that were given; notes problems."""
    name = _type_of(reading, "scheduler", SCHEDULERS)
    if name is None:
        return None
    params = _read_params(reading, SCHEDULERS[name], reading.of("scheduler.params", {}), "scheduler")
    for needed in _NEEDED.get(name, ()):
        full = f"scheduler.params.{needed}"
        if needed not in params and not any(text.startswith(full) for text in reading.problems):
            reading.problem(full, f"missing; {name} needs it")
    return NamedBlock(name, params)


def _type_of(reading: Reading, block: str, types: Mapping[str, Any]) -> str | None:
    """The type's own spelling, or None with a problem noted if a block was given."""
    given = reading.of(f"{block}.type")
    works = ", ".join(types)
    if given is None:
        if f"{block}.params" in reading.values:
            reading.problem(f"{block}.type", f"missing; these work: {works}")
        return None
    spelling = {name.lower(): name for name in types}
    if given.lower() in spelling:
        return spelling[given.lower()]
    own = "or pass an optimizer of your own" if block == "optimizer" else "or pass one of torch's"
    if given.lower() in {name.lower() for name in _REFUSED_OPTIMIZERS}:
        reading.problem(f"{block}.type", f"{given} is not built; these work: {works}; {own}")
        return None
    near = difflib.get_close_matches(given.lower(), spelling, n=1, cutoff=0.7)
    hint = f"; did you mean {spelling[near[0]]!r}?" if near else f"; these work: {works}; {own}"
    reading.problem(f"{block}.type", f"unknown type {given!r}{hint}")
    return None


def _read_params(
    reading: Reading, keys: tuple[Key, ...], raw: Mapping[str, Any], block: str
) -> dict[str, Any]:
    by_name = {key.last: key for key in keys}
    for name, value in raw.items():
        full = f"{block}.params.{name}"
        if str(name).startswith(("_", "#", "//")) or value is None:
            continue
        if name in by_name:
            reading.take(by_name[name], full, value)
        else:
            near = difflib.get_close_matches(str(name), by_name, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(by_name)}"
            reading.problem(full, f"unknown key; {hint}")
    return {
        name: reading.values[key.name] for name, key in by_name.items() if key.name in reading.values
    }
