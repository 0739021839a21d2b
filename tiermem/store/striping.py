"""How one record lies over its targets. Pure: numbers in, numbers out.

A record, padded to 4096 bytes, is cut into stripe units. Unit after unit goes to a target so that
every target's share follows its weight at *every* prefix, not only in the end; a sub-range of a record
is then spread in proportion too, and all drives (and host memory) take part in reading it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, overload

from tiermem.errors import ConfigError
from tiermem.types import ALIGNMENT, round_up


class Piece(NamedTuple):
    """``length`` bytes at ``record_offset`` of a record lie at ``target_offset`` of ``target``.

    ``target_offset`` counts from the start of the record's own space on that target.
    """

    target: int
    target_offset: int
    record_offset: int
    length: int


class UnitSequence:
    """The infinite sequence of targets for stripe units, in proportion to ``weights``.

    After any number n of units every target has had its share n * w / sum(w) to within less than one
    unit (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980: among the
    targets that are owed enough, the one whose deadline is first). Taking the most indebted target
    instead does not keep that bound for many targets. Records that continue one sequence share the
    load even if each of them is smaller than a stripe over all targets.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = float(sum(weights))
        if not weights or any(not weight >= 0 for weight in weights) or not 0 < total < float("inf"):
            raise ConfigError(
                f"stripe weights must be finite, at least 0 and not all 0; got {list(weights)}"
            )
        self.num_targets = len(weights)
        self._shares = [(at, weight / total) for at, weight in enumerate(weights) if weight > 0]
        self._given = [0] * self.num_targets
        self._count = 0

    def take(self, num_units: int) -> array[int]:
        """The targets of the next ``num_units`` units."""
        if len(self._shares) == 1:
            return array("H", [self._shares[0][0]]) * num_units
        return array("H", [self._next() for _ in range(num_units)])

    def _next(self) -> int:
        self._count += 1
        threshold = 1 / (2 * len(self._shares) - 2)
        best, first_deadline, most_owed, fallback = -1, 0.0, 0.0, self._shares[0][0]
        for target, share in self._shares:
            owed = share * self._count - self._given[target]
            if owed >= threshold:
                deadline = (1 - threshold - owed) / share
                if best < 0 or deadline < first_deadline:
                    best, first_deadline = target, deadline
            if owed > most_owed:
                most_owed, fallback = owed, target
        chosen = best if best >= 0 else fallback  # rounding may leave nobody above the threshold
        self._given[chosen] += 1
        return chosen


class StripeMap(Sequence[Piece]):
    """The extents of one record, in record order, 18 bytes each. Immutable.

    Units that follow each other on the same target are one extent.
    """

    __slots__ = (
        "_record_starts",
        "_target_starts",
        "_targets",
        "nbytes",
        "padded_bytes",
        "target_bytes",
    )

    def __init__(self, nbytes: int, stripe_bytes: int, units: Sequence[int], num_targets: int) -> None:
        self.nbytes = nbytes
        self.padded_bytes = round_up(nbytes)
        self._record_starts = array("q")
        self._target_starts = array("q")
        self._targets = array("H")
        used = [0] * num_targets
        start, previous = 0, -1
        for target in units:
            stop = min(start + stripe_bytes, self.padded_bytes)
            if target != previous:
                self._record_starts.append(start)
                self._target_starts.append(used[target])
                self._targets.append(target)
                previous = target
            used[target] += stop - start
            start = stop
        self.target_bytes = tuple(used)
        """Bytes of the padded record on each target."""

    def __len__(self) -> int:
        return len(self._targets)

    @overload
    def __getitem__(self, index: int) -> Piece: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Piece, ...]: ...

    def __getitem__(self, index: int | slice) -> Piece | tuple[Piece, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        at = range(len(self))[index]
        start = self._record_starts[at]
        return Piece(self._targets[at], self._target_starts[at], start, self._stop(at) - start)

    def resolve(self, start: int, stop: int) -> list[Piece]:
        """The pieces of the bytes [start, stop) of the padded record, in record order."""
        if not 0 <= start <= stop <= self.padded_bytes:
            raise ValueError(f"[{start}, {stop}) is not within a record of {self.padded_bytes} bytes")
        if len(self._targets) == 1:  # a small record, as a rule
            return [Piece(self._targets[0], start, start, stop - start)] if start < stop else []
        pieces: list[Piece] = []
        at = bisect_right(self._record_starts, start) - 1
        while start < stop:
            end = min(stop, self._stop(at))
            skipped = start - self._record_starts[at]
            pieces.append(
                Piece(self._targets[at], self._target_starts[at] + skipped, start, end - start)
            )
            start = end
            at += 1
        return pieces

    def _stop(self, at: int) -> int:
        return self._record_starts[at + 1] if at + 1 < len(self._targets) else self.padded_bytes


def plan_extents(
    nbytes: int,
    stripe_bytes: int,
    weights: Sequence[float],
    sequence: UnitSequence | None = None,
) -> StripeMap:
    """Lays a record of ``nbytes`` over the targets 0..len(weights)-1.

    ``stripe_bytes`` is a multiple of 4096. A weight of 0 gets nothing. Starts a new sequence, so that
    the same arguments give the same extents, unless ``sequence`` (of the same weights) is continued.
    Raises `ConfigError` for weights or a stripe that cannot work.
    """
    if stripe_bytes <= 0 or stripe_bytes % ALIGNMENT:
        raise ConfigError(f"stripe_bytes is {stripe_bytes}; give a positive multiple of {ALIGNMENT}")
    if nbytes < 0:
        raise ValueError(f"a record cannot have {nbytes} bytes")
    sequence = UnitSequence(weights) if sequence is None else sequence
    units = sequence.take(-(-nbytes // stripe_bytes))
    return StripeMap(nbytes, stripe_bytes, units, sequence.num_targets)


def resolve(extents: StripeMap, start: int, stop: int) -> list[Piece]:
    """`StripeMap.resolve` as a function."""
    return extents.resolve(start, stop)
