"""Extents are disjoint, complete, in proportion to the weights, and found again for any sub-range."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import ConfigError
from tiermem.store.striping import Piece, StripeMap, UnitSequence, plan_extents, resolve
from tiermem.types import round_up

BLOCK = 4096

sizes = st.integers(0, 300 * BLOCK)
stripes = st.integers(1, 9).map(lambda blocks: blocks * BLOCK)
weight_lists = (
    st.lists(st.one_of(st.just(0.0), st.floats(0.01, 100)), min_size=1, max_size=8)
    .filter(any)
    .map(lambda weights: [float(weight) for weight in weights])
)


@given(sizes, stripes, weight_lists)
@settings(max_examples=300, deadline=None)
def test_disjoint_complete_and_dense(nbytes: int, stripe: int, weights: list[float]) -> None:
    extents = plan_extents(nbytes, stripe, weights)
    assert extents.padded_bytes == round_up(nbytes)
    at, used = 0, [0] * len(weights)
    for piece in extents:
        assert piece.record_offset == at  # complete and disjoint in the record
        assert piece.target_offset == used[piece.target]  # and dense on every target
        assert piece.length > 0
        assert piece.length % BLOCK == 0
        at += piece.length
        used[piece.target] += piece.length
    assert at == round_up(nbytes)
    assert tuple(used) == extents.target_bytes
    assert all(first.target != second.target for first, second in pairwise(extents))


@given(sizes, stripes, weight_lists)
@settings(max_examples=300, deadline=None)
def test_every_prefix_is_within_one_stripe_of_its_share(
    nbytes: int, stripe: int, weights: list[float]
) -> None:
    extents = plan_extents(nbytes, stripe, weights)
    total = sum(weights)
    prefixes = [*range(0, extents.padded_bytes, stripe), extents.padded_bytes]
    for stop in prefixes:
        used = [0] * len(weights)
        for piece in extents.resolve(0, stop):
            used[piece.target] += piece.length
        for got, weight in zip(used, weights, strict=True):
            assert abs(got - stop * weight / total) <= stripe * (1 + 1e-9)
            if weight == 0:
                assert got == 0


@given(sizes.filter(bool), stripes, weight_lists, st.data())
@settings(max_examples=300, deadline=None)
def test_resolve_is_what_brute_force_finds(
    nbytes: int, stripe: int, weights: list[float], data: st.DataObject
) -> None:
    extents = plan_extents(nbytes, stripe, weights)
    stop = data.draw(st.integers(0, extents.padded_bytes))
    start = data.draw(st.integers(0, stop))
    expected = []
    for piece in extents:
        low = max(start, piece.record_offset)
        high = min(stop, piece.record_offset + piece.length)
        if low < high:
            skipped = low - piece.record_offset
            expected.append(Piece(piece.target, piece.target_offset + skipped, low, high - low))
    assert resolve(extents, start, stop) == expected


@given(stripes, weight_lists, st.lists(st.integers(1, 20), max_size=30))
@settings(max_examples=100, deadline=None)
def test_records_that_continue_a_sequence_share_the_load(
    stripe: int, weights: list[float], units: list[int]
) -> None:
    sequence = UnitSequence(weights)
    used = [0] * len(weights)
    for count in units:
        extents = plan_extents(count * stripe, stripe, weights, sequence)
        used = [had + got for had, got in zip(used, extents.target_bytes, strict=True)]
    total = sum(units) * stripe
    for got, weight in zip(used, weights, strict=True):
        assert abs(got - total * weight / sum(weights)) <= stripe * (1 + 1e-9)


def test_equal_arguments_give_equal_extents() -> None:
    first = plan_extents(1 << 24, 1 << 16, [1, 2.5, 0.3])
    second = plan_extents(1 << 24, 1 << 16, [1, 2.5, 0.3])
    assert list(first) == list(second)
    assert isinstance(first, StripeMap)
    assert first[-1] == first[len(first) - 1]
    assert first[1:3] == (first[1], first[2])


def test_one_target_is_one_extent() -> None:
    assert list(plan_extents(10 << 20, 1 << 16, [0, 3])) == [Piece(1, 0, 0, 10 << 20)]


def test_empty_record_has_no_extents() -> None:
    assert list(plan_extents(0, BLOCK, [1, 1])) == []


def test_large_records_are_planned_and_resolved_by_arithmetic() -> None:
    extents = plan_extents(100 << 30, 1 << 20, [1, 1, 0.5, 3])
    pieces = extents.resolve(50 << 30, (50 << 30) + (8 << 20))
    assert sum(piece.length for piece in pieces) == 8 << 20


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan")], [float("inf"), 1]])
def test_weights_that_cannot_work(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        plan_extents(BLOCK, BLOCK, weights)


@pytest.mark.parametrize("stripe", [0, -4096, 1000])
def test_stripes_that_cannot_work(stripe: int) -> None:
    with pytest.raises(ConfigError, match=str(stripe)):
        plan_extents(BLOCK, stripe, [1])


def test_ranges_outside_of_the_record() -> None:
    extents = plan_extents(5000, BLOCK, [1, 1])
    with pytest.raises(ValueError, match="8192"):
        extents.resolve(0, 8193)
