"""Latencies in logarithmic buckets: the same ones as in native/src/engine_latency.c.

Bucket ``i`` below 16 holds exactly ``i`` ns; above, each power of two has 16 buckets of equal
width, so that a percentile is known to 1/16 of its value. The last bucket also holds everything
from 2**40 ns (18 minutes) on.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import accumulate

NUM_BUCKETS = 592
_SUB_BITS = 4
_SUB_BUCKETS = 1 << _SUB_BITS


def bucket_of(ns: int) -> int:
    """The bucket of a latency of ``ns`` nanoseconds."""
    if ns < _SUB_BUCKETS:
        return max(0, ns)
    exponent = ns.bit_length() - 1
    sub = (ns >> (exponent - _SUB_BITS)) & (_SUB_BUCKETS - 1)
    return min((exponent - _SUB_BITS + 1) * _SUB_BUCKETS + sub, NUM_BUCKETS - 1)


def bucket_bounds(bucket: int) -> tuple[int, int]:
    """The latencies of a bucket in ns: from the first up to, not including, the second."""
    if bucket < _SUB_BUCKETS:
        return bucket, bucket + 1
    power, sub = divmod(bucket, _SUB_BUCKETS)
    width = 1 << (power - 1)
    low = (_SUB_BUCKETS + sub) * width
    return low, low + width


@dataclass(frozen=True, slots=True)
class Latency:
    """How long chunks took: their sum in ns, and how many fell into each bucket."""

    sum_ns: int = 0
    buckets: tuple[int, ...] = (0,) * NUM_BUCKETS

    @property
    def count(self) -> int:
        """Chunks recorded."""
        return sum(self.buckets)

    @property
    def mean_ns(self) -> float | None:
        """The mean, which is exact; None without chunks."""
        count = self.count
        return self.sum_ns / count if count else None

    def percentile_ns(self, percent: float) -> float | None:
        """The latency that ``percent`` of the chunks did not exceed, as the middle of its bucket:
        off by at most 1/32. None where so few chunks cannot show it (p99 takes 100, p99.9 takes 1000).
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent is {percent}; it must be above 0 and at most 100")
        count = self.count
        if count == 0 or (percent < 100 and count * (100 - percent) < 100 * (1 - 1e-9)):
            return None
        wanted = count * percent / 100 * (1 - 1e-12)
        totals = accumulate(self.buckets)
        bucket = next(index for index, total in enumerate(totals) if total >= wanted)
        low, high = bucket_bounds(bucket)
        return (low + high - 1) / 2

    def __add__(self, other: Latency) -> Latency:
        pairs = zip(self.buckets, other.buckets, strict=True)
        return Latency(self.sum_ns + other.sum_ns, tuple(a + b for a, b in pairs))

    def __sub__(self, earlier: Latency) -> Latency:
        """What was recorded since ``earlier``."""
        pairs = zip(self.buckets, earlier.buckets, strict=True)
        return Latency(self.sum_ns - earlier.sum_ns, tuple(a - b for a, b in pairs))


class LatencyCounter:
    """Records latencies; any thread may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of both fields
        self._sum_ns = 0
        self._buckets = [0] * NUM_BUCKETS

    def count(self, ns: int) -> None:
        with self._lock:
            self._sum_ns += ns
            self._buckets[bucket_of(ns)] += 1

    def read(self) -> Latency:
        with self._lock:
            return Latency(self._sum_ns, tuple(self._buckets))
