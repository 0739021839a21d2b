"""What is known of all gradients together: their norm, and which of them are not finite.

Squares were summed while gradients were accumulated, in an order that does not depend on the
partition (see [Note: gradients]); here they are added up over parameters and ranks.

[Note: split models] Ranks that share out states have the same model. A model may itself be split
over other dimensions of the mesh, by tensor parallelism (its `DTensor` parameters, or ``model_mesh``
of `shard`) and pipeline parallelism (``model_mesh``). Squares of what is split are added over that
dimension too; parameters that are the same there (norms, biases that are added after a reduction)
count once, as its first rank has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from tiermem.comm import Communicator
from tiermem.zero.group import ParamGroup
from tiermem.zero.param import ShardedParam

Counts = Callable[[ShardedParam], bool]
Among = tuple[Communicator, tuple[Communicator, ...]]
"""The ranks that share out states, and those of each other dimension that the model is split over."""


def sum_of_squares(groups: Iterable[ParamGroup], counts: Counts) -> float:
    """Of all gradients of ``groups`` as they are scaled now, but those of parameters that do not
    count; not finite if one is not. Over several ranks one exchange of a number for each
    communicator; where models are split over other dimensions, of two numbers for one of them, four for
    two, and one more exchange over each; see [Note: split models]."""
    kinds: dict[Among, dict[tuple[bool, ...], list[float]]] = {}
    for group in groups:
        among = (group.sharing.comm, group.across)
        if among not in kinds:  # every kind of parameter, also those that only other ranks have
            kinds[among] = {same: [] for same in product((False, True), repeat=len(group.across))}
        own = group.gradient
        for param in _present(group, counts):
            assert own is not None
            kinds[among][param.replicated].append(own.sum_squares[param.index] * own.scale**2)
    sums = []
    for (comm, across), squares in kinds.items():
        totals = _over_ranks(comm, [_sum(values) for values in squares.values()])
        for dimension, other in enumerate(across):
            if other.size == 1:
                continue
            rows = other.gather_values("gradient norm over the model's ranks", totals)
            totals = [
                rows[0][i] if same[dimension] else _sum([row[i] for row in rows])
                for i, same in enumerate(squares)
            ]
        sums += totals
    return _sum(sums)


def _over_ranks(comm: Communicator, totals: list[float]) -> list[float]:
    if comm.size == 1:
        return totals
    rows = comm.gather_values("gradient norm", totals)
    return [_sum(column) for column in zip(*rows, strict=True)]


def not_finite(groups: Iterable[ParamGroup], counts: Counts) -> list[str]:
    """Names of the parameters whose gradients are not finite on some rank. All ranks call it."""
    kinds: dict[Among, list[str]] = {}
    for group in groups:
        bad = kinds.setdefault((group.sharing.comm, group.across), [])
        for param in _present(group, counts):
            assert group.gradient is not None
            if not math.isfinite(group.gradient.sum_squares[param.index]):
                bad.append(param.name)
    names: dict[str, None] = {}
    for (comm, across), bad in kinds.items():
        for among in (comm, *across):
            if among.size > 1:
                texts = among.gather_texts("names of overflows", "\n".join(bad))
                bad = list(dict.fromkeys(name for text in texts for name in text.splitlines()))
        names.update(dict.fromkeys(bad))
    return list(names)


def _present(group: ParamGroup, counts: Counts) -> list[ShardedParam]:
    own = group.gradient
    return [p for p in group.params if own is not None and p.index in own.present and counts(p)]


def _sum(values: Sequence[float]) -> float:
    """Rounded once, in any order; not finite if one is not."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
