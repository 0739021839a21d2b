"""Which options each parameter is updated with, and which options can work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tiermem.zero.group import ShardedParam


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
