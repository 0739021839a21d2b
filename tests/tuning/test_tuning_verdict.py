"""Intervals hold what they promise, and what is not surely better is not called better."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.tuning.candidates import Candidate
from tiermem.tuning.verdict import CONFIDENCE, gain_of, judge

DEFAULT = Candidate("io_uring")
SMALL = Candidate("io_uring", 1 << 20, 4, 4)
LARGE = Candidate("io_uring", 1 << 20, 64, 64)


@given(st.integers(1, 60), st.sampled_from([0.9, 0.95, 0.99]))
def test_ranks_are_those_of_the_binomial(pairs: int, confidence: float) -> None:
    gain = gain_of([float(i) for i in range(pairs)], confidence)

    def covers(rank: int) -> float:
        return 1 - 2 * sum(math.comb(pairs, i) for i in range(rank)) / 2**pairs

    if gain.low is None or gain.high is None:
        assert covers(1) < confidence
        return
    rank = int(gain.low) + 1
    assert int(gain.high) == pairs - rank
    assert covers(rank) >= confidence - 1e-12
    assert rank == pairs // 2 or covers(rank + 1) < confidence


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        gain = gain_of([rng.lognormvariate(0, 0.3) for _ in range(11)])
        assert gain.low is not None
        assert gain.high is not None
        held += gain.low <= 1.0 <= gain.high
    assert held / 2000 > CONFIDENCE - 0.02


@pytest.mark.parametrize("pairs", [1, 3, 5])
def test_too_few_pairs_say_nothing(pairs: int) -> None:
    verdict = judge([{DEFAULT: 1.0, LARGE: 2.0}] * pairs, DEFAULT)
    assert verdict.chosen == DEFAULT
    assert verdict.gain is not None
    assert verdict.gain.low is None


def test_the_smaller_of_two_equals() -> None:
    rounds = [{DEFAULT: 1.0, LARGE: 1.5 + (i % 2) * 0.02, SMALL: 1.51} for i in range(12)]
    verdict = judge(rounds, DEFAULT)
    assert verdict.chosen == SMALL


def test_the_larger_one_if_it_is_surely_better() -> None:
    rounds = [{DEFAULT: 1.0, LARGE: 1.6, SMALL: 1.5} for _ in range(12)]
    assert judge(rounds, DEFAULT).chosen == LARGE


def test_a_lead_is_not_given_up_for_noise() -> None:
    """The smaller one is slower by a tenth in most rounds, which are too few to be sure."""
    rounds = [{DEFAULT: 1.0, LARGE: 1.65 if i % 4 else 1.4, SMALL: 1.5} for i in range(10)]
    assert judge(rounds, DEFAULT).chosen == LARGE


def test_a_gain_below_one_percent_is_none() -> None:
    verdict = judge([{DEFAULT: 1.0, LARGE: 1.004}] * 20, DEFAULT)
    assert not verdict.is_distinguishable
    assert verdict.rival == LARGE
