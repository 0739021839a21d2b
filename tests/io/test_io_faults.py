"""Every failure at every chunk is either handled (same bytes) or raised (with the errno)."""

from __future__ import annotations

import errno
import gc
import logging

import pytest
from io_rig import CHUNK, Rig, RigMaker

import tiermem.io as tio
from tiermem.io import Fault, FaultKind, Op

NUM_CHUNKS = 6
LENGTH = NUM_CHUNKS * CHUNK
EVERY_CHUNK = range(NUM_CHUNKS)


def start(one: Rig, op: Op) -> tio.Request:
    return one.read(0, LENGTH) if op == Op.READ else one.write(0, LENGTH)


def check_bytes(one: Rig, op: Op, new: bytes) -> None:
    if op == Op.READ:
        assert one.memory(0, LENGTH) == one.data
    else:
        assert one.on_disk(0, LENGTH) == new


@pytest.fixture(params=list(Op), ids=["read", "write"])
def op(request: pytest.FixtureRequest) -> Op:
    return Op(request.param)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_error(rig: RigMaker, op: Op, code: int) -> None:
    one = rig(LENGTH)
    for nth in EVERY_CHUNK:
        one.engine.inject(Fault(op, nth, FaultKind.ERROR, code))
        request = start(one, op)
        with pytest.raises(OSError, match=f"failed at offset {nth * CHUNK}") as caught:
            request.wait()
        assert caught.value.errno == code
        with pytest.raises(OSError, match="failed at offset"):
            request.wait()  # again the same
        start(one, op).wait()  # the fault is used up


def test_lowest_failure_is_reported(rig: RigMaker, op: Op) -> None:
    one = rig(LENGTH)
    one.engine.inject(Fault(op, 2, FaultKind.ERROR, errno.EIO, repeat=100))
    with pytest.raises(OSError, match=f"failed at offset {2 * CHUNK}"):
        start(one, op).wait()


@pytest.mark.parametrize("direct", [True, False])
def test_short(rig: RigMaker, op: Op, direct: bool) -> None:
    one = rig(LENGTH, direct=direct)
    for nth in EVERY_CHUNK:
        new = bytes([nth + 1]) * LENGTH
        one.load(new)
        before = one.engine.stats()
        one.engine.inject(Fault(op, nth, FaultKind.SHORT))
        start(one, op).wait()
        check_bytes(one, op, new)
        after = one.engine.stats()
        assert after.retries == before.retries + 1
        moved = after.read_bytes + after.written_bytes - before.read_bytes - before.written_bytes
        assert moved == LENGTH


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [4096, 8192 - 4096, 12288])
def test_short_small(rig: RigMaker, op: Op, direct: bool, length: int) -> None:
    one = rig(LENGTH, direct=direct)
    one.load(b"\x17" * length)
    one.engine.inject(Fault(op, 0, FaultKind.SHORT))
    (one.read(0, length) if op == Op.READ else one.write(0, length)).wait()
    if op == Op.READ:
        assert one.memory(0, length) == one.data[:length]
    else:
        assert one.on_disk(0, length + 1) == b"\x17" * length + one.data[length : length + 1]


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("repeat", [1, 3])
def test_refused_submission(rig: RigMaker, op: Op, code: int, repeat: int) -> None:
    one = rig(LENGTH)
    for nth in EVERY_CHUNK:
        new = bytes([nth + 1]) * LENGTH
        one.load(new)
        before = one.engine.stats().retries
        one.engine.inject(Fault(op, nth, FaultKind.SUBMIT_ERROR, code, repeat))
        start(one, op).wait()
        check_bytes(one, op, new)
        assert one.engine.stats().retries >= before + repeat


def test_refused_submission_for_good(rig: RigMaker, op: Op) -> None:
    one = rig(LENGTH)
    for nth in EVERY_CHUNK:
        one.engine.inject(Fault(op, nth, FaultKind.SUBMIT_ERROR, errno.EBADF))
        with pytest.raises(OSError, match="failed at offset") as caught:
            start(one, op).wait()
        assert caught.value.errno == errno.EBADF


def test_refused_for_ever_gives_up(rig: RigMaker, op: Op) -> None:
    one = rig(LENGTH)
    one.engine.inject(Fault(op, 0, FaultKind.SUBMIT_ERROR, errno.EAGAIN, repeat=1_000_000))
    with pytest.raises(OSError, match="failed at offset 0") as caught:
        start(one, op).wait(30)
    assert caught.value.errno == errno.EAGAIN
    start(one, op).wait()


def test_partial_submit(rig: RigMaker, op: Op) -> None:
    one = rig(LENGTH)
    for nth in EVERY_CHUNK:
        new = bytes([nth + 1]) * LENGTH
        one.load(new)
        one.engine.inject(Fault(op, nth, FaultKind.PARTIAL_SUBMIT))
        start(one, op).wait()
        check_bytes(one, op, new)
    if one.engine.name == "libaio":
        assert one.engine.stats().retries > 0


def test_real_refusal(rig: RigMaker) -> None:
    one = rig(LENGTH)
    with open("/dev/null", "rb") as file:
        closed = file.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        one.engine.submit(one.queue, Op.READ, closed, 0, one.buffer.address, LENGTH).wait()
    one.read(0, LENGTH).wait()
    assert one.memory(0, LENGTH) == one.data


def test_unwaited_failure_is_logged(rig: RigMaker, caplog: pytest.LogCaptureFixture) -> None:
    one = rig(LENGTH)
    one.engine.inject(Fault(Op.WRITE, 1, FaultKind.ERROR, errno.ENOSPC))
    with caplog.at_level(logging.ERROR):
        request = one.write(0, LENGTH)
        while not request.done():
            pass
        del request
        gc.collect()
    assert "nobody waited for a transfer that failed: write of" in caplog.text


def test_waited_failure_is_not_logged(rig: RigMaker, caplog: pytest.LogCaptureFixture) -> None:
    one = rig(LENGTH)
    one.engine.inject(Fault(Op.WRITE, 1, FaultKind.ERROR, errno.ENOSPC))
    request = one.write(0, LENGTH)
    with pytest.raises(OSError, match="No space left"):
        request.wait()
    del request
    gc.collect()
    assert not caplog.text
