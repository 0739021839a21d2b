"""The use trace predicts a repeated order, and nothing once the order has changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiermem.schedule.trace import UseTrace

PASSES = st.lists(st.integers(0, 6), min_size=1, max_size=20)


@given(PASSES)
def test_a_repeated_pass_is_predicted(uses: list[int]) -> None:
    trace = UseTrace()
    trace.begin()
    for group in uses:
        trace.use(group)
    trace.begin()
    for position, group in enumerate(uses):
        assert trace.upcoming(1) == [group]
        assert trace.distance()[group] == 0
        cyclic = dict.fromkeys(uses[position:] + uses[:position])
        assert trace.upcoming(100) == list(cyclic)
        trace.use(group)
    assert trace.following
    assert trace.mismatches == 0


@given(PASSES, st.data())
def test_a_changed_order_stops_the_prediction_and_is_learnt(
    uses: list[int], data: st.DataObject
) -> None:
    trace = UseTrace()
    trace.begin()
    for group in uses:
        trace.use(group)
    trace.begin()
    position = data.draw(st.integers(0, len(uses) - 1))
    changed = [*uses[:position], 7, *uses[position:]]
    for group in changed:
        trace.use(group)
    assert not trace.following
    assert trace.mismatches == 1
    trace.begin()
    assert trace.upcoming(100) == list(dict.fromkeys(changed))


def test_nothing_is_predicted_at_first() -> None:
    trace = UseTrace()
    trace.begin()
    trace.use(1)
    assert trace.upcoming(5) == []
    assert trace.distance() == {}
