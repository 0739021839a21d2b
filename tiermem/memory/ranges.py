"""`RangeSet`: a set of integers kept as sorted disjoint half-open ranges. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class RangeSet:
    """Ranges that touch are merged. Not thread safe."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __bool__(self) -> bool:
        return bool(self._starts)

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def discard(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        if first >= last:
            return
        kept = [
            (low, high)
            for low, high in (
                (self._starts[first], min(start, self._stops[first])),
                (max(stop, self._starts[last - 1]), self._stops[last - 1]),
            )
            if low < high
        ]
        self._starts[first:last] = [low for low, _ in kept]
        self._stops[first:last] = [high for _, high in kept]

    def clear(self) -> None:
        self._starts.clear()
        self._stops.clear()

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of [start, stop) is in the set."""
        if start >= stop:
            return True
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and self._stops[at] >= stop

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not in the set, in order."""
        gaps: list[tuple[int, int]] = []
        at = bisect_right(self._stops, start)
        while start < stop and at < len(self._starts) and self._starts[at] < stop:
            if start < self._starts[at]:
                gaps.append((start, self._starts[at]))
            start = self._stops[at]
            at += 1
        if start < stop:
            gaps.append((start, stop))
        return gaps

    @property
    def total(self) -> int:
        return sum(self._stops) - sum(self._starts)
