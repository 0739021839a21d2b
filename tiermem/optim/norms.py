"""What is known of all gradients together: their norm, and which of them are not finite.

Squares were summed while gradients were accumulated, in an order that does not depend on the
partition (see [Note: gradients]); here they are added up over parameters and ranks.

[Note: split models] Ranks that share out states have the same model. A model may itself be split over
another dimension of the mesh, by tensor or pipeline parallelism (``model_mesh`` of `shard`). Squares of
what is split are added over that dimension too; parameters that are the same there (norms, biases that
are added after a reduction) count once, as its first rank has them.
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
    communicator, and one more for each other dimension that models are split over; see
    [Note: split models]."""
    kinds: dict[tuple[Communicator, Communicator | None], tuple[list[float], list[float]]] = {}
    for group in groups:
        split, same = kinds.setdefault((group.sharing.comm, group.across), ([], []))
        own = group.gradient
        for param in _present(group, counts):
            assert own is not None
            mine = same if param.replicated else split
            mine.append(own.sum_squares[param.index] * own.scale**2)
    sums = []
    for (comm, across), (split, same) in kinds.items():
        totals = [_sum(split), _sum(same)] if across is not None else [_sum([*split, *same])]
        totals = _over_ranks(comm, totals)
        if across is not None and across.size > 1:
            rows = across.gather_values("gradient norm over the model's ranks", totals)
            totals = [_sum([row[0] for row in rows]), rows[0][1]]
        sums += totals
    return _sum(sums)


def _over_ranks(comm: Communicator, totals: list[float]) -> list[float]:
    if comm.size == 1:
        return totals
    rows = comm.gather_values("gradient norm", totals)
    return [_sum(column) for column in zip(*rows, strict=True)]


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
