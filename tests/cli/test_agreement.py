"""Losses are compared by their bits, and a NaN never passes."""

from __future__ import annotations

import math

from tiermem.cli.summary import Agreement, float_bits


def test_equal_bits() -> None:
    agreement = Agreement([1.5, 2.25], [1.5, 2.25])
    assert agreement.bit_equal
    assert "all 2 losses are bit-equal" in str(agreement)


def test_a_small_difference_is_shown_and_accepted() -> None:
    agreement = Agreement([1.0, 2.0], [1.0, 2.002])
    assert not agreement.bit_equal
    assert agreement.acceptable
    assert "1 of 2 losses" in str(agreement)


def test_a_large_difference_and_nan_are_not() -> None:
    assert not Agreement([1.0], [1.1]).acceptable
    assert not Agreement([math.nan], [1.0]).acceptable
    assert not Agreement([1.0], [math.nan]).acceptable
    assert "DO NOT AGREE" in str(Agreement([1.0], [2.0]))


def test_zeros_of_both_signs_differ_in_bits() -> None:
    assert float_bits(0.0) != float_bits(-0.0)
