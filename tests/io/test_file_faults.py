"""Every fault at every part of a file's transfers: the same bytes, or the errno with the place."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from file_rig import open_or_skip, random_file, require_direct

import tiermem.io as tio
from tiermem.io import Fault, FaultKind, Op, QueueOptions, files

CHUNK = 16 << 10
NUM_CHUNKS = 6
SIZE = NUM_CHUNKS * CHUNK
OPTIONS = QueueOptions(CHUNK, read_depth=4, write_depth=4)
HANDLED = {
    "short": (FaultKind.SHORT, 0, 1),
    "EINTR": (FaultKind.SUBMIT_ERROR, errno.EINTR, 2),
    "EAGAIN": (FaultKind.SUBMIT_ERROR, errno.EAGAIN, 2),
    "partial": (FaultKind.PARTIAL_SUBMIT, 0, 1),
}
# In the file and in memory: straight to the drive, and by way of the page cache.
PLACES = {"aligned": (0, SIZE), "unaligned": (100, SIZE - 300)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", HANDLED)
def test_handled(tmp_path: Path, backend: str, kind: str, place: str) -> None:
    data = random_file(tmp_path / "f", SIZE)
    offset, length = PLACES[place]
    fault, code, repeat = HANDLED[kind]
    with (
        open_or_skip(backend, tmp_path / "f", options=OPTIONS) as file,
        tio.aligned_buffer(2 * SIZE) as buffer,
        buffer.view[offset : offset + length] as memory,
    ):
        for nth in range(NUM_CHUNKS):
            buffer.fill(0)
            file.engine.inject(Fault(Op.READ, nth, fault, code, repeat))
            file.read_into(memory, offset).wait()
            assert bytes(memory) == data[offset : offset + length]
            memory[:] = bytes([nth + 1]) * length
            file.engine.inject(Fault(Op.WRITE, nth, fault, code, repeat))
            file.write_from(memory, offset).wait()
            expected = data[:offset] + bytes(memory) + data[offset + length :]
            file.flush()
            assert (tmp_path / "f").read_bytes() == expected
            memory[:] = data[offset : offset + length]
            file.engine.inject(None)
            file.write_from(memory, offset).wait()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("place", PLACES)
def test_raised(tmp_path: Path, backend: str, place: str, code: int) -> None:
    random_file(tmp_path / "f", SIZE)
    offset, length = PLACES[place]
    with (
        open_or_skip(backend, tmp_path / "f", options=OPTIONS) as file,
        tio.aligned_buffer(2 * SIZE) as buffer,
        buffer.view[offset : offset + length] as memory,
    ):
        for op, start in ((Op.READ, file.read_into), (Op.WRITE, file.write_from)):
            for nth in range(NUM_CHUNKS):
                file.engine.inject(Fault(op, nth, FaultKind.ERROR, code))
                transfer = start(memory, offset)
                with pytest.raises(tio.TierIOError, match=os.strerror(code)) as caught:
                    transfer.wait()
                assert caught.value.errno == code
                assert caught.value.context.path == str(tmp_path / "f")
                assert (caught.value.context.offset, caught.value.context.length) == (offset, length)
                file.engine.inject(None)
                start(memory, offset).wait()


@pytest.mark.parametrize("refused", ["open", "first read"])
def test_o_direct_is_refused(
    tmp_path: Path, backend: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache serves instead, said once."""
    data = random_file(tmp_path / "f", SIZE)
    with open_or_skip(backend, tmp_path / "f") as file:
        require_direct(file)
    real = os.open

    def refuse_flag(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    def refuse_read(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        if refused == "open":
            patch.setattr(files.os, "open", refuse_flag)
        else:
            patch.setattr(files.os, "preadv", refuse_read)
        file = open_or_skip(backend, tmp_path / "f")
    with file:
        assert not file.direct
        memory = bytearray(SIZE)
        file.read_into(memory, 0).wait()
        assert memory == data
        file.write_from(data[::-1], 0).wait()
        file.flush()
    assert (tmp_path / "f").read_bytes() == data[::-1]


def failing_writes(file: tio.AsyncFile, nth: int = 0) -> None:
    file.engine.inject(Fault(Op.WRITE, nth, FaultKind.ERROR, errno.ENOSPC))


def test_flush_tells_of_a_failed_write_that_was_dropped(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, as fdatasync does: the writes after it are not concerned."""
    with open_or_skip(backend, tmp_path / "f", "w") as file:
        failing_writes(file)
        file.write_from(bytes(SIZE), 0)
        with pytest.raises(tio.TierIOError) as caught:
            file.flush()
        assert caught.value.errno == errno.ENOSPC
        assert str(tmp_path / "f") in str(caught.value)
        assert caplog.text.count("nobody waited") == 1
        file.write_from(bytes(SIZE), 0)
        file.flush()


def test_flush_waits_for_all_before_it_raises(tmp_path: Path, backend: str) -> None:
    """Or the next flush would call durable what is still on its way."""
    with open_or_skip(backend, tmp_path / "f", "w", options=OPTIONS) as file:
        failing_writes(file)
        writes = [file.write_from(bytes(SIZE), at * SIZE) for at in range(20)]
        with pytest.raises(tio.TierIOError):
            file.flush()
        assert all(write.done() for write in writes)
        file.flush()
