"""Every chunk's time is recorded once, in buckets that are as narrow as promised."""

from __future__ import annotations

import errno
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from io_rig import CHUNK, MIB, RigMaker

import tiermem.io as tio
from tiermem.io.latency import NUM_BUCKETS, Latency, LatencyCounter, bucket_bounds, bucket_of


@given(st.integers(0, (1 << 40) - 1))
def test_a_bucket_holds_its_latency_within_a_sixteenth(ns: int) -> None:
    low, high = bucket_bounds(bucket_of(ns))
    assert low <= ns < high
    assert high - low <= max(1, low / 16)


def test_buckets_adjoin_and_the_last_takes_the_rest() -> None:
    for bucket in range(NUM_BUCKETS - 1):
        assert bucket_bounds(bucket)[1] == bucket_bounds(bucket + 1)[0]
    assert bucket_bounds(NUM_BUCKETS - 1)[1] == 1 << 40
    assert bucket_of(1 << 50) == NUM_BUCKETS - 1


@given(st.lists(st.integers(0, 1 << 36), min_size=1, max_size=300), st.sampled_from([50.0, 99.0, 99.9]))
def test_percentiles_are_those_of_the_sorted_list(values: list[int], percent: float) -> None:
    counter = LatencyCounter()
    for value in values:
        counter.count(value)
    found = counter.read().percentile_ns(percent)
    if len(values) * (100 - percent) < 100 - 1e-6:
        assert found is None
        return
    rank = next(n for n in range(1, len(values) + 1) if n * 100 >= len(values) * percent - 1e-9)
    exact = sorted(values)[rank - 1]
    assert found == pytest.approx(exact, rel=1 / 16, abs=1)


def test_differences_and_sums() -> None:
    counter = LatencyCounter()
    counter.count(100)
    before = counter.read()
    counter.count(1000)
    since = counter.read() - before
    assert (since.count, since.sum_ns, since.mean_ns) == (1, 1000, 1000)
    assert before + since == counter.read()
    assert Latency().mean_ns is None
    assert Latency().percentile_ns(50) is None


def test_each_chunk_is_recorded_by_queue_and_operation(rig: RigMaker, engine: tio.Engine) -> None:
    first, second = rig(MIB), rig(MIB)
    began = time.monotonic_ns()
    first.read(0, MIB).wait()
    first.read(0, CHUNK // 2).wait()
    second.write(0, 4 * CHUNK).wait()
    elapsed = time.monotonic_ns() - began
    chunks = MIB // CHUNK
    latency = engine.latency(first.queue, tio.Op.READ)
    assert latency.count == chunks + 1
    assert 0 < latency.sum_ns <= (chunks + 1) * elapsed
    assert engine.latency(first.queue, tio.Op.WRITE).count == 0
    assert engine.latency(second.queue, tio.Op.WRITE).count == 4
    assert engine.latency(second.queue, tio.Op.READ).count == 0


def test_the_sum_agrees_with_the_buckets(rig: RigMaker, engine: tio.Engine) -> None:
    one = rig(MIB)
    one.write(0, MIB).wait()
    latency = engine.latency(one.queue, tio.Op.WRITE)
    bounds = [(count, *bucket_bounds(i)) for i, count in enumerate(latency.buckets) if count]
    assert sum(n * low for n, low, _ in bounds) <= latency.sum_ns < sum(n * top for n, _, top in bounds)


def test_one_that_is_continued_counts_once_and_a_failed_one_not(
    rig: RigMaker, engine: tio.Engine
) -> None:
    one = rig(MIB)
    engine.inject(tio.Fault(tio.Op.READ, 0, tio.FaultKind.SHORT))
    one.read(0, CHUNK).wait()
    assert engine.latency(one.queue, tio.Op.READ).count == 1
    engine.inject(tio.Fault(tio.Op.READ, 0, tio.FaultKind.ERROR, errno.EIO))
    with pytest.raises(OSError, match="failed"):
        one.read(0, CHUNK).wait()
    engine.inject(None)
    assert engine.latency(one.queue, tio.Op.READ).count == 1


def test_a_refused_submission_does_not_start_the_clock(rig: RigMaker, engine: tio.Engine) -> None:
    one = rig(MIB)
    if engine.name == "threads":
        pytest.skip("its refusals are played inside of the chunk")
    pause_ns = 50_000 * (2**9 - 1)  # the pauses of 9 refusals
    engine.inject(tio.Fault(tio.Op.READ, 0, tio.FaultKind.SUBMIT_ERROR, errno.EAGAIN, repeat=9))
    began = time.monotonic_ns()
    one.read(0, CHUNK).wait()
    elapsed = time.monotonic_ns() - began
    assert engine.latency(one.queue, tio.Op.READ).sum_ns <= elapsed - pause_ns


def test_an_unknown_queue_is_refused(engine: tio.Engine) -> None:
    with pytest.raises(ValueError, match="queue is 7"):
        engine.latency(7, tio.Op.READ)
