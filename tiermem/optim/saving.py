"""``state_dict`` in torch's shape, and what may be loaded from one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermem.errors import StateError
from tiermem.optim.state import LazyState, LazyStates
from tiermem.zero.param import ShardedParam


@dataclass(frozen=True, slots=True)
class LoadedState:
    """Of each parameter group its options, and of each parameter that has one its state."""

    options: list[dict[str, Any]]
    states: dict[ShardedParam, Mapping[str, Any]]


def pack_state(
    param_groups: Sequence[Mapping[str, Any]], state_of: Callable[[int], LazyState | None]
) -> dict[str, Any]:
    """A ``state_dict`` whose states are those that ``state_of`` gives for a parameter's number."""
    groups, start = [], 0
    for group in param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        options["params"] = list(range(start, start + len(group["params"])))
        start += len(group["params"])
        groups.append(options)
    total = start
    states = LazyStates(lambda: list(range(total)), lambda i: state_of(i) if 0 <= i < total else None)
    return {"state": states, "param_groups": groups}


def load_state(
    param_groups: Sequence[Mapping[str, Any]],
    params: Sequence[ShardedParam],
    state_dict: Mapping[str, Any],
    tensors: Sequence[str],
    numbers: Sequence[str],
) -> LoadedState:
    """What ``state_dict`` says of ``params``, those of ``param_groups`` in their order. Raises
    `StateError` if it is of something else, or lacks one of the keys of a parameter: ``tensors`` of its
    shape, and ``numbers``."""
    if "param_groups" not in state_dict or "state" not in state_dict:
        raise StateError("a state has the keys 'state' and 'param_groups'; this one lacks some")
    saved = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in param_groups]
    if [len(group["params"]) for group in saved] != sizes:
        raise StateError(
            f"the loaded state has parameter groups of sizes "
            f"{[len(group['params']) for group in saved]}, this optimizer has {sizes}"
        )
    positions = itertools.chain.from_iterable(group["params"] for group in saved)
    found = {
        param: state_dict["state"][position]
        for position, param in zip(positions, params, strict=True)
        if position in state_dict["state"]
    }
    for param, state in found.items():
        _check(param, state, tensors, numbers)
    options = [{key: value for key, value in group.items() if key != "params"} for group in saved]
    return LoadedState(options, found)


def _check(
    param: ShardedParam, saved: Mapping[str, Any], tensors: Sequence[str], numbers: Sequence[str]
) -> None:
    missing = [key for key in (*numbers, *tensors) if key not in saved]
    if missing:
        raise StateError(f"the loaded state of {param.name!r} lacks {', '.join(missing)}")
    if "step" in saved and not _counts(saved["step"]):
        raise StateError(
            f"step of {param.name!r} is {saved['step']!r}; it must be a whole number, at least 0"
        )
    for key in (*tensors, "master"):
        value = saved.get(key)
        if value is None:  # of momentum that has not begun
            continue
        if not isinstance(value, torch.Tensor):
            raise StateError(f"{key} of {param.name!r} is a {type(value).__name__}, not a tensor")
        if tuple(value.shape) != tuple(param.shape):
            raise StateError(
                f"{key} of {param.name!r} has shape {tuple(value.shape)}, the parameter has "
                f"{tuple(param.shape)}"
            )


def _counts(step: Any) -> bool:
    try:
        number = float(step)
    except (TypeError, ValueError):
        return False
    return number >= 0 and number.is_integer()
