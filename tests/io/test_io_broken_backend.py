"""A queue whose backend can no longer say what has ended: everybody hears of it, nothing hangs."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle, product

import pytest
from io_rig import CHUNK, MIB, Rig, RigMaker

import tiermem.io as tio
from tiermem.io import Fault, FaultKind, Op

DEPTH = 8
LENGTH = 32 * MIB
PART = LENGTH // 32


def rings() -> set[int]:
    """The descriptors of this process's io_urings."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd for fd, link in links.items() if link == "anon_inode:[io_uring]"}


@pytest.fixture
def broken(rig: RigMaker, backend: str) -> RigMaker:
    if backend == "threads":
        pytest.skip("Python threads have nothing to collect")
    return rig


def break_at(one: Rig, op: Op, nth: int = 0, code: int = errno.EBADF) -> None:
    one.engine.inject(Fault(op, nth, FaultKind.REAP_ERROR, code))


def start_all(starts: Iterable[Callable[[], tio.Request]], code: int) -> list[tio.Request]:
    """Those that were accepted: the queue may find out at once, and refuses from then on."""
    requests = []
    try:
        for start in starts:
            requests.append(start())
    except OSError as error:
        assert error.errno == code
    return requests


def fails(request: tio.Request, code: int, operation: str, offset: int, length: int = PART) -> None:
    text = f"{operation} of {length} bytes at offset {offset} failed at offset"
    with pytest.raises(OSError, match=text) as caught:
        request.wait(30)
    assert caught.value.errno == code


@pytest.mark.parametrize("nth", [0, 3, DEPTH - 1, DEPTH, 20])
def test_all_in_flight_and_queued_fail(broken: RigMaker, nth: int) -> None:
    one = broken(LENGTH, read_depth=DEPTH, write_depth=DEPTH)
    break_at(one, Op.READ, nth)
    starts = [partial(one.read, at, PART, at=at) for at in range(0, LENGTH, PART)]
    reads = start_all(starts, errno.EBADF)
    ended = nth // (PART // CHUNK)  # of these all chunks were started before the failure
    for number, request in enumerate(reads[ended:], ended):
        fails(request, errno.EBADF, "read", number * PART)
    for request in reads[:ended]:
        with contextlib.suppress(OSError):
            request.wait(30)


def test_both_operations_and_priorities(broken: RigMaker) -> None:
    one = broken(LENGTH, read_depth=1, write_depth=1, chunk_bytes=MIB)
    break_at(one, Op.READ, code=errno.EIO)
    first = one.read(0, 4 * MIB)
    starts = [
        partial(start, at, PART, at=at, priority=priority)
        for at, (priority, start) in zip(
            range(4 * MIB, LENGTH, PART),
            cycle(product(tio.Priority, (one.read, one.write))),
            strict=False,
        )
    ]
    others = start_all(starts, errno.EIO)
    fails(first, errno.EIO, "read", 0, 4 * MIB)
    for number, request in enumerate(others):
        fails(request, errno.EIO, ("read", "write")[number % 2], (4 + number) * MIB)


def test_the_kernel_is_done_with_the_memory(broken: RigMaker) -> None:
    """Whoever hears of the failure may use the memory again: nothing is written to it any more."""
    one = broken(LENGTH, read_depth=DEPTH, chunk_bytes=LENGTH // DEPTH)
    break_at(one, Op.READ, DEPTH - 1)
    fails(one.read(0, LENGTH), errno.EBADF, "read", 0, LENGTH)
    # All chunks were with the kernel, which does not fail: so each must have arrived by now.
    assert one.memory(0, LENGTH) == one.data


def test_new_submits_are_refused_with_the_same_error(broken: RigMaker) -> None:
    one = broken(MIB)
    break_at(one, Op.WRITE, code=errno.EPERM)
    fails(one.write(0, CHUNK), errno.EPERM, "write", 0, CHUNK)
    for start in (one.read, one.write):
        with pytest.raises(OSError, match="takes no more transfers") as caught:
            start(0, CHUNK)
        assert caught.value.errno == errno.EPERM
    one.engine.cancel(one.queue)


def test_other_queues_go_on(broken: RigMaker) -> None:
    one = broken(MIB)
    other = broken(2 * MIB)
    break_at(one, Op.READ)
    fails(one.read(0, CHUNK), errno.EBADF, "read", 0, CHUNK)
    other.read(0, 2 * MIB).wait()
    assert other.memory(0, 2 * MIB) == other.data


def test_close_and_drop_after_a_failure(broken: RigMaker) -> None:
    one = broken(LENGTH)
    break_at(one, Op.READ, 2)
    starts = [partial(one.read, at, PART, at=at) for at in range(0, LENGTH, PART)]
    requests = start_all(starts, errno.EBADF)
    one.engine.close()
    assert all(request.done() for request in requests)


def test_a_ring_that_was_closed_by_somebody(broken: RigMaker, backend: str) -> None:
    if backend != "io_uring":
        pytest.skip("only io_uring has a ring")
    before = rings()
    one = broken(MIB)
    (ring,) = rings() - before
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), ring, inheritable=False)
    with pytest.raises(OSError, match="not supported"):
        one.read(0, MIB).wait(30)
    with pytest.raises(OSError, match="takes no more transfers"):
        while True:  # the thread finds out when it goes to sleep
            one.read(0, CHUNK).done()
