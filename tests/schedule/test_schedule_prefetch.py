"""What is fetched ahead, and what is given up for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiermem.schedule.prefetch import choose_victim, plan_prefetch

GROUPS = st.integers(0, 9)


@given(
    st.lists(GROUPS, unique=True),
    st.lists(st.integers(0, 100), min_size=10, max_size=10),
    st.integers(0, 400),
)
def test_prefetch_is_the_longest_prefix_of_the_uses_within_the_bytes(
    upcoming: list[int], sizes: list[int], ahead: int
) -> None:
    group_bytes = dict(enumerate(sizes))
    wanted = plan_prefetch(upcoming, group_bytes, ahead)
    assert wanted == upcoming[: len(wanted)]
    assert sum(group_bytes[group] for group in wanted) <= ahead
    if len(wanted) < len(upcoming):  # the next one would not have fitted
        assert sum(group_bytes[group] for group in upcoming[: len(wanted) + 1]) > ahead


@given(st.sets(GROUPS, min_size=1), st.dictionaries(GROUPS, st.integers(0, 30)), st.integers(-1, 30))
def test_the_victim_is_used_last(
    candidates: set[int], distance: dict[int, int], not_before: int
) -> None:
    victim = choose_victim(candidates, distance, not_before)
    unknown = candidates - distance.keys()
    if unknown:
        assert victim in unknown
    elif victim is None:
        assert all(distance[group] <= not_before for group in candidates)
    else:
        assert distance[victim] == max(distance[group] for group in candidates) > not_before


def test_nobody_is_a_victim_of_nothing() -> None:
    assert choose_victim([], {}) is None
