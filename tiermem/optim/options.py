"""Which options each parameter is updated with, and which options can work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from tiermem.errors import ConfigError
from tiermem.zero.param import ShardedParam


class OptionIndex:
    """Finds a parameter's group in ``param_groups``, which are the user's to change at any time.

    ``resolve`` gives the handle of a member of ``params``. A place once found is only confirmed;
    all are looked up anew when a parameter is no longer where it was, or a list's length changed.
    """

    def __init__(self, resolve: Callable[[torch.Tensor], ShardedParam]) -> None:
        self._resolve = resolve
        self._places: dict[ShardedParam, tuple[int, int]] = {}  # group, position in its params
        self._members: list[list[int]] = []  # by group, their ids

    def find(
        self, groups: Sequence[Mapping[str, Any]], param: ShardedParam
    ) -> Mapping[str, Any] | None:
        """The group that ``param`` is in now; None if it is in none."""
        place = self._places.get(param)
        if not self._is_current(groups, param, place):
            self._members = [list(map(id, group["params"])) for group in groups]
            self._places = {
                self._resolve(member): (index, position)
                for index, group in enumerate(groups)
                for position, member in enumerate(group["params"])
            }
            place = self._places.get(param)
        return None if place is None else groups[place[0]]

    def _is_current(
        self, groups: Sequence[Mapping[str, Any]], param: ShardedParam, place: tuple[int, int] | None
    ) -> bool:
        if place is None:  # rare: in the same unit as parameters of ours, but in no group
            return self._members == [list(map(id, group["params"])) for group in groups]
        index, position = place
        if index >= len(groups) or len(groups[index]["params"]) != len(self._members[index]):
            return False
        return self._resolve(groups[index]["params"][position]) is param


def check_adam_options(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for options of Adam and AdamW that cannot work."""
    if options.get("amsgrad"):
        raise ConfigError(
            "amsgrad=True is not supported (a third moment); use amsgrad=False, or "
            "tiermem.optim.Tiered(torch.optim.AdamW, params, amsgrad=True)"
        )
    check_numbers(options, ("lr", "eps", "weight_decay"))
    betas = options.get("betas", (0.9, 0.999))
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"betas are {betas!r}; they must be two numbers, such as (0.9, 0.999)")
    if not all(0 <= _number("one of the betas", beta) < 1 for beta in betas):
        raise ConfigError(f"betas are {betas}; each must be at least 0 and below 1")


def check_numbers(options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises `ConfigError` unless each that is given is a number, at least 0 and finite."""
    for name in names:
        if name not in options:
            continue
        value = _number(name, options[name])
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be at least 0 and finite")


def _number(name: str, value: object) -> float:
    """Numbers and real tensors of one element (a learning rate that a scheduler fills)."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigError(f"{name} is a tensor of {value.numel()} elements; it must be a number")
        if not value.is_complex() and value.dtype is not torch.bool:
            return float(value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    kind = f"{value.dtype} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    raise ConfigError(
        f"{name} is {value!r}, a {kind}; it must be a number, such as {_USUAL.get(name, 0.9)}"
    )


_USUAL = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 1e-2}
