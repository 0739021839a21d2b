"""Which groups to fetch ahead, and which to give up for them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence


def plan_prefetch(
    upcoming: Sequence[int], group_bytes: Mapping[int, int], ahead_bytes: int
) -> list[int]:
    """The groups of ``upcoming`` that should be gathered by now, in order of use: until
    ``ahead_bytes`` of parameters lie ahead of the present use, gathered already or not."""
    wanted: list[int] = []
    total = 0
    for group in upcoming:
        total += group_bytes[group]
        if total > ahead_bytes:
            break
        wanted.append(group)
    return wanted


def choose_victim(
    candidates: Collection[int], distance: Mapping[int, int], not_before: int = -1
) -> int | None:
    """The candidate whose next use is farthest away (Belady's rule on the known cycle), groups
    of unknown use first; None if none is used later than ``not_before`` uses from now."""
    if not candidates:
        return None
    victim = max(candidates, key=lambda group: distance.get(group, sys.maxsize))
    return victim if distance.get(victim, sys.maxsize) > not_before else None
