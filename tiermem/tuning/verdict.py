"""What repeated paired runs say about which setting is best, and how surely. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiermem.tuning.candidates import Candidate

CONFIDENCE = 0.95
"""For all comparisons of a verdict together."""

LEAST_GAIN = 1.01
"""Less than that over the default is not worth a setting of its own."""

TIE = 1.02
"""What leads by more is not given up for a smaller one, however few the runs."""

Round = Mapping[Candidate, float]
"""GB/s of each candidate, measured one after the other."""


@dataclass(frozen=True, slots=True)
class Gain:
    """``median`` of the ratios of ``pairs`` of runs; the true median is within ``low`` and ``high``,
    which are None where the runs are too few to say."""

    median: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def is_above_one(self) -> bool:
        return self.low is not None and self.low > 1.0

    @property
    def width(self) -> float:
        """From ``low`` to ``high``; infinite where they are not known."""
        return math.inf if self.low is None or self.high is None else self.high - self.low

    def fields(self) -> dict[str, Any]:
        return {
            name: None if value is None else round(value, 4)
            for name, value in (("median", self.median), ("low", self.low), ("high", self.high))
        } | {"pairs": self.pairs}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``chosen`` is to be used. ``rival`` is the best that is not the default, and ``gain`` its ratio
    to the default; if that is not surely above 1, the default was chosen."""

    chosen: Candidate
    default: Candidate
    rival: Candidate | None
    gain: Gain | None
    rounds: int

    @property
    def is_compared(self) -> bool:
        """Whether the runs were enough to say anything about another setting."""
        return self.gain is not None and self.gain.low is not None

    @property
    def is_distinguishable(self) -> bool:
        return self.chosen != self.default


def gain_of(ratios: Sequence[float], confidence: float = CONFIDENCE) -> Gain:
    """The median and its interval from order statistics: whatever the distribution of the ratios, the
    true median is between the k-th lowest and the k-th highest of n with probability
    1 - 2 P(Binomial(n, 1/2) < k)."""
    ordered = sorted(ratios)
    rank = 0
    outside, term = 0.0, 2.0 ** -len(ordered)
    while rank < len(ordered) // 2:
        outside += term
        if 2 * outside > 1 - confidence:
            break
        rank += 1
        term *= (len(ordered) - rank + 1) / rank
    low, high = (ordered[rank - 1], ordered[-rank]) if rank else (None, None)
    return Gain(statistics.median(ordered), low, high, len(ordered))


def ratios_of(rounds: Sequence[Round], one: Candidate, other: Candidate) -> list[float]:
    """``one`` over ``other`` in every round that has both."""
    return [r[one] / r[other] for r in rounds if one in r and other in r and r[other] > 0]


def judge(rounds: Sequence[Round], default: Candidate) -> Verdict:
    """From rounds that chose nothing themselves, or the best would look better than it is.

    Among those that are surely better than the default and as good as the best of them (neither surely
    worse nor by more than a few percent), the one with least in flight.
    """
    rivals = list(dict.fromkeys(c for r in rounds for c in r if c != default))
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(rivals))
    gains = {c: gain_of(ratios_of(rounds, c, default), confidence) for c in rivals}
    gains = {c: gain for c, gain in gains.items() if gain.pairs}
    if not gains:
        return Verdict(default, default, None, None, len(rounds))
    better = [c for c, gain in gains.items() if gain.is_above_one and gain.median >= LEAST_GAIN]
    if not better:
        rival = max(gains, key=lambda c: gains[c].median)
        return Verdict(default, default, rival, gains[rival], len(rounds))
    best = max(better, key=lambda c: gains[c].median)
    equal = [c for c in better if c == best or _is_tie(rounds, best, c, confidence)]
    chosen = min(equal, key=lambda c: c.size)
    return Verdict(chosen, default, chosen, gains[chosen], len(rounds))


def _is_tie(rounds: Sequence[Round], best: Candidate, other: Candidate, confidence: float) -> bool:
    lead = gain_of(ratios_of(rounds, best, other), confidence)
    return lead.median <= TIE and not lead.is_above_one
