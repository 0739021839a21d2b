"""What is known of all gradients together: their norm, and which of them are not finite.

Squares were summed while gradients were accumulated, in an order that does not depend on the
partition (see [Note: gradients]); here they are added up over parameters and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tiermem.comm import Communicator
from tiermem.zero.group import ParamGroup, ShardedParam

Counts = Callable[[ShardedParam], bool]


def sum_of_squares(groups: Iterable[ParamGroup], counts: Counts) -> float:
    """Of all gradients of ``groups`` as they are scaled now, but those of parameters that do not
    count; not finite if one is not. Over several ranks one exchange of a number for each
    communicator."""
    by_comm: dict[Communicator, list[float]] = {}
    for group in groups:
        mine = by_comm.setdefault(group.sharing.comm, [])
        own = group.gradient
        if own is not None:
            mine += [own.sum_squares[p.index] * own.scale**2 for p in _present(group, counts)]
    sums = []
    for comm, values in by_comm.items():
        total = _sum(values)
        every = comm.gather_values("gradient norm", [total]) if comm.size > 1 else [(total,)]
        sums.append(_sum([row[0] for row in every]))
    return _sum(sums)


def not_finite(groups: Iterable[ParamGroup], counts: Counts) -> list[str]:
    """Names of the parameters whose gradients are not finite on some rank. All ranks call it."""
    by_comm: dict[Communicator, dict[str, float]] = {}
    for group in groups:
        flags = by_comm.setdefault(group.sharing.comm, {})
        bad = {
            p.index
            for p in _present(group, counts)
            if group.gradient is not None and not math.isfinite(group.gradient.sum_squares[p.index])
        }
        flags.update({param.name: float(param.index in bad) for param in group.params})
    names: list[str] = []
    for comm, flags in by_comm.items():
        every = comm.gather_values("overflow", list(flags.values())) if comm.size > 1 else None
        columns = [tuple(flags.values())] if every is None else every
        names += [
            name for name, each in zip(flags, zip(*columns, strict=True), strict=True) if any(each)
        ]
    return names


def _present(group: ParamGroup, counts: Counts) -> list[ShardedParam]:
    own = group.gradient
    return [p for p in group.params if own is not None and p.index in own.present and counts(p)]


def _sum(values: Sequence[float]) -> float:
    """Rounded once, in any order; not finite if one is not."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
