"""Which transfer goes when: priorities, depth limits, completion per request, owners."""

from __future__ import annotations

import errno
import gc
import weakref

import pytest
from io_rig import CHUNK, MIB, RigMaker

from tiermem.io import Fault, FaultKind, Op, Priority

LENGTH = 16 * MIB


@pytest.mark.parametrize("op", list(Op), ids=["read", "write"])
def test_demand_goes_ahead(rig: RigMaker, op: Op) -> None:
    """At depth 1 chunks start one by one, so the number of the failing chunk tells the order."""
    one = rig(LENGTH, read_depth=1, write_depth=1)
    start = one.read if op == Op.READ else one.write
    num_chunks = LENGTH // CHUNK
    # First come, first served would hit `demand` with chunk number num_chunks + 1.
    one.engine.inject(Fault(op, num_chunks + 1, FaultKind.ERROR, errno.EIO))
    large = start(0, LENGTH)
    behind = start(0, CHUNK)
    demand = start(0, CHUNK, priority=Priority.DEMAND)
    demand.wait()
    large.wait()
    with pytest.raises(OSError, match="Input/output error"):
        behind.wait()


def test_completion_is_per_request(rig: RigMaker) -> None:
    """The large request stalls at its first chunk; the small one before it completes meanwhile."""
    one = rig(LENGTH)
    one.engine.inject(Fault(Op.READ, 1, FaultKind.SUBMIT_ERROR, errno.EAGAIN, repeat=25))
    small = one.read(0, CHUNK)
    large = one.read(0, LENGTH)
    small.wait()
    assert not large.done()
    large.wait()
    assert one.memory(0, LENGTH) == one.data


@pytest.mark.parametrize(("read_depth", "write_depth"), [(1, 1), (3, 2), (8, 4)])
def test_depth_is_a_limit(rig: RigMaker, read_depth: int, write_depth: int) -> None:
    one = rig(LENGTH, read_depth=read_depth, write_depth=write_depth)
    for request in [one.read(0, MIB, at=number * MIB) for number in range(16)]:
        request.wait()
    assert 1 <= one.engine.stats().max_in_flight <= read_depth
    pairs = [(one.read(0, MIB), one.write(8 * MIB, MIB, at=8 * MIB)) for _ in range(16)]
    for pair in pairs:
        for request in pair:
            request.wait()
    assert one.engine.stats().max_in_flight <= read_depth + write_depth


def test_in_flight_across_requests(rig: RigMaker) -> None:
    """Requests of one chunk each overlap: the queue does not drain between them."""
    one = rig(LENGTH, chunk_bytes=MIB)
    for _ in range(50):
        for request in [one.read(number * MIB, MIB, at=number * MIB) for number in range(16)]:
            request.wait()
        if one.engine.stats().max_in_flight > 1:
            break
    assert one.engine.stats().max_in_flight > 1
    assert one.memory(0, LENGTH) == one.data


def test_stats_are_exact(rig: RigMaker) -> None:
    first, second = rig(MIB), rig(MIB)
    first.read(0, MIB).wait()
    first.write(0, 5 * CHUNK).wait()
    second.read(0, CHUNK + 4096).wait()
    stats = first.engine.stats()
    assert (stats.read_bytes, stats.written_bytes) == (MIB + CHUNK + 4096, 5 * CHUNK)
    assert (stats.read_chunks, stats.written_chunks) == (MIB // CHUNK + 2, 5)
    assert stats.by_queue == {first.queue: (MIB, 5 * CHUNK), second.queue: (CHUNK + 4096, 0)}


class Owner:
    """Something that a weak reference can watch."""


def test_owner_lives_until_completion_is_seen(rig: RigMaker) -> None:
    one = rig(MIB)
    owner = Owner()
    alive = weakref.ref(owner)
    request = one.read(0, MIB, owner=owner)
    del owner
    gc.collect()
    assert alive() is not None
    request.wait()
    gc.collect()
    assert alive() is None


def test_dropped_request_completes_before_its_owner_goes(rig: RigMaker) -> None:
    one = rig(LENGTH)
    owner = Owner()
    seen: list[int] = []
    weakref.finalize(owner, lambda: seen.append(one.engine.stats().read_bytes))
    request = one.read(0, LENGTH, owner=owner)
    del owner, request
    one.engine.close()
    gc.collect()
    assert seen == [LENGTH]


def test_wait_times_out(rig: RigMaker) -> None:
    one = rig(MIB)
    one.engine.inject(Fault(Op.READ, 0, FaultKind.SUBMIT_ERROR, errno.EAGAIN, repeat=20))
    request = one.read(0, MIB)
    with pytest.raises(TimeoutError, match="not complete after"):
        request.wait(0.001)
    request.wait(30)
