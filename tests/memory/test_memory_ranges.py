"""A range set behaves as the set of integers it stands for."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.memory.ranges import RangeSet

LIMIT = 24
spans = st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT))
steps = st.lists(st.tuples(st.booleans(), spans), max_size=12)


@given(steps, spans)
@settings(max_examples=400, deadline=None)
def test_equals_a_set_of_integers(
    actions: list[tuple[bool, tuple[int, int]]], probe: tuple[int, int]
) -> None:
    ranges, model = RangeSet(), set[int]()
    for adding, (start, stop) in actions:
        if adding:
            ranges.add(start, stop)
            model |= set(range(start, stop))
        else:
            ranges.discard(start, stop)
            model -= set(range(start, stop))
    held = list(ranges)
    assert {value for start, stop in held for value in range(start, stop)} == model
    assert all(stop < after for (_, stop), (after, _) in itertools.pairwise(held))
    assert all(start < stop for start, stop in held)
    assert ranges.total == len(model)
    assert bool(ranges) == bool(model)
    wanted = set(range(*probe))
    assert ranges.covers(*probe) == (wanted <= model)
    missing = [value for start, stop in ranges.missing(*probe) for value in range(start, stop)]
    assert missing == sorted(wanted - model)
