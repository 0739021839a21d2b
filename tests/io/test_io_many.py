"""Many transfers handed over at once: the same as one by one, and each has its own result."""

from __future__ import annotations

import errno
import gc
import random
import weakref

import pytest
from io_rig import CHUNK, MIB, Rig, RigMaker

import tiermem.io as tio
from tiermem.errors import StateError
from tiermem.io import Fault, FaultKind, Op, Priority
from tiermem.io.base import Move

NUM = 12
BLOCK = 4096


def moves_of(one: Rig, length: int = BLOCK) -> list[Move]:
    """``NUM`` neighbours, the first of the file."""
    return [(one.file.fd, at * length, one.buffer.address + at * length, length) for at in range(NUM)]


@pytest.mark.parametrize("direct", [True, False])
def test_same_bytes(rig: RigMaker, direct: bool) -> None:
    """Of mixed lengths, longer than a chunk among them, in any order."""
    one = rig(4 * MIB, direct=direct)
    choose = random.Random(3)
    moves: list[Move] = []
    at = 0
    while at < 4 * MIB:
        length = min(choose.choice([BLOCK, 3 * BLOCK, CHUNK, 3 * CHUNK]), 4 * MIB - at)
        moves.append((one.file.fd, at, one.buffer.address + at, length))
        at += length
    choose.shuffle(moves)
    for request in one.engine.submit_many(one.queue, Op.READ, moves):
        request.wait()
    assert one.memory(0, 4 * MIB) == one.data
    one.load(one.data[::-1])
    for request in one.engine.submit_many(one.queue, Op.WRITE, moves):
        request.wait()
    assert one.on_disk(0, 4 * MIB) == one.data[::-1]


@pytest.mark.parametrize("op", list(Op), ids=["read", "write"])
@pytest.mark.parametrize("nth", range(NUM))
def test_each_failure_belongs_to_its_own(rig: RigMaker, op: Op, nth: int) -> None:
    """At depth 1 they start in the order given, so the number of the failing chunk says which one."""
    one = rig(read_depth=1, write_depth=1)
    one.engine.inject(Fault(op, nth, FaultKind.ERROR, errno.EIO))
    requests = one.engine.submit_many(one.queue, op, moves_of(one))
    for at, request in enumerate(requests):
        if at == nth:
            with pytest.raises(OSError, match=f"offset {at * BLOCK} failed at"):
                request.wait()
        else:
            request.wait()


@pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.SUBMIT_ERROR, FaultKind.PARTIAL_SUBMIT])
def test_what_is_handled_is_not_seen(rig: RigMaker, kind: FaultKind) -> None:
    one = rig()
    for nth in range(NUM):
        with one.buffer.view as view:
            view[:] = bytes(MIB)
        code = errno.EAGAIN if kind == FaultKind.SUBMIT_ERROR else 0
        one.engine.inject(Fault(Op.READ, nth, kind, code, 2 if code else 1))
        for request in one.engine.submit_many(one.queue, Op.READ, moves_of(one, 3 * BLOCK)):
            request.wait()
        assert one.memory(0, NUM * 3 * BLOCK) == one.data[: NUM * 3 * BLOCK]


def test_all_or_none(rig: RigMaker) -> None:
    one = rig()
    moves = moves_of(one)
    for wrong in [(one.file.fd, -1, one.buffer.address, BLOCK), (-1, 0, one.buffer.address, BLOCK)]:
        with pytest.raises(ValueError, match="negative"):
            one.engine.submit_many(one.queue, Op.READ, [*moves, wrong])
    with pytest.raises(ValueError, match="queue is 7"):
        one.engine.submit_many(7, Op.READ, moves)
    one.read(0, BLOCK).wait()
    assert one.engine.stats().read_chunks == 1


def test_empty_ones(rig: RigMaker) -> None:
    one = rig()
    assert list(one.engine.submit_many(one.queue, Op.READ, [])) == []
    nothing = (one.file.fd, 0, one.buffer.address, 0)
    some = (one.file.fd, 0, one.buffer.address, BLOCK)
    for request in one.engine.submit_many(one.queue, Op.READ, [nothing, some, nothing]):
        request.wait()
    assert one.engine.stats().read_bytes == BLOCK


def test_demand_goes_ahead(rig: RigMaker) -> None:
    one = rig(16 * MIB, read_depth=1)
    num_chunks = 16 * MIB // CHUNK
    # First come, first served would hit one of `demand` with this number.
    one.engine.inject(Fault(Op.READ, num_chunks + NUM, FaultKind.ERROR, errno.EIO))
    large = one.read(0, 16 * MIB)
    behind = one.read(0, CHUNK)
    demand = one.engine.submit_many(one.queue, Op.READ, moves_of(one), priority=Priority.DEMAND)
    for request in [*demand, large]:
        request.wait()
    with pytest.raises(OSError, match="Input/output error"):
        behind.wait()


def test_closed(rig: RigMaker) -> None:
    one = rig()
    one.engine.close()
    with pytest.raises(StateError, match="closed"):
        one.engine.submit_many(one.queue, Op.READ, moves_of(one))


def test_close_waits_for_all_of_them(rig: RigMaker) -> None:
    one = rig(16 * MIB)
    moves = [(one.file.fd, at, one.buffer.address + at, MIB) for at in range(0, 16 * MIB, MIB)]
    requests = one.engine.submit_many(one.queue, Op.READ, moves)
    one.engine.close()
    assert all(request.done() for request in requests)
    assert one.memory(0, 16 * MIB) == one.data


class Owner:
    """Something that a weak reference can watch."""


def test_the_owner_is_everyones(rig: RigMaker) -> None:
    one = rig()
    owner = Owner()
    alive = weakref.ref(owner)
    first, *others = one.engine.submit_many(one.queue, Op.READ, moves_of(one), owner=owner)
    del owner
    for request in others:
        request.wait()
    gc.collect()
    assert alive() is not None
    first.wait()
    gc.collect()
    assert alive() is None


def test_one_hand_over_is_one_batch(engine: tio.Engine, rig: RigMaker) -> None:
    """What was handed over together goes to the kernel together, as far as the queue is deep."""
    if engine.name not in ("io_uring", "libaio"):
        pytest.skip("one system call for each transfer")
    one = rig(read_depth=NUM)
    for request in engine.submit_many(one.queue, Op.READ, moves_of(one)):
        request.wait()
    assert engine.stats().submit_calls == 1
