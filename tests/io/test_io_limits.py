"""Limits that show only when a transfer is under way: raised with the errno, and others go on."""

from __future__ import annotations

import errno
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from io_rig import MIB, RigMaker

import tiermem.io as tio

ROOT = Path(__file__).resolve().parents[2]
FORBID = Path(__file__).with_name("seccomp.py").read_text()
# pread64, preadv, preadv2
READS = {"x86_64": (17, 295, 327), "aarch64": (67, 69, 286)}.get(platform.machine())

REFUSED_FOR_EVER = """
import errno, tiermem.io as tio
forbid([int(number) for number in sys.argv[3:]], errno.EAGAIN)
engine = tio.open_engine(sys.argv[2])
queue = engine.add_queue(tio.QueueOptions(4096, 2, 2))
with open(sys.argv[1] + "/f", "w+b") as file, tio.aligned_buffer(8192) as buffer:
    file.write(bytes(8192))
    file.flush()
    request = engine.submit(queue, tio.Op.READ, file.fileno(), 0, buffer.address, 4096)
    try:
        request.wait(30)
        sys.exit("it was read")
    except OSError as error:
        print(errno.errorcode[error.errno], engine.stats().retries)
    engine.submit(queue, tio.Op.WRITE, file.fileno(), 0, buffer.address, 8192).wait(30)
engine.close()
"""


@pytest.mark.skipif(READS is None, reason="the numbers of its system calls are not known")
@pytest.mark.parametrize("backend", ["native_threads", "threads"])
def test_a_transfer_that_always_ends_with_eagain(tmp_path: Path, backend: str) -> None:
    """Tried again a hundred times, then raised; the next request is served."""
    if tio.probe_backends(tmp_path)[backend] != "works":
        pytest.skip("it does not work here")
    assert READS is not None
    done = subprocess.run(
        [sys.executable, "-c", FORBID + REFUSED_FOR_EVER, str(tmp_path), backend, *map(str, READS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.stderr.startswith("SKIP "):
        pytest.skip(done.stderr[5:])
    assert done.stdout.split() == ["EAGAIN", "100"], done.stderr


@pytest.mark.parametrize("direct", [True, False])
def test_a_limit_on_file_sizes_that_came_later(rig: RigMaker, direct: bool) -> None:
    """A write across it is short and then refused; reads, and writes below it, are as before."""
    one = rig(2 * MIB, direct=direct)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    one.load(b"n" * (2 * MIB))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 4096, hard))
    try:
        beyond = one.write(MIB + 8192, 4096)
        across = one.write(MIB, 3 * 4096)
        below = one.write(0, 4096)
        for request in (beyond, across):
            with pytest.raises(OSError, match="failed at offset") as caught:
                request.wait()
            assert caught.value.errno == errno.EFBIG
        below.wait()
        one.read(MIB, MIB, at=MIB).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert one.on_disk(0, 4096) == b"n" * 4096
    assert one.memory(MIB + 3 * 4096, 4096) == one.data[MIB + 3 * 4096 :][:4096]
    one.write(MIB, MIB).wait()


def test_a_path_that_vanishes(rig: RigMaker, tmp_path: Path) -> None:
    """An open file lives on without its name."""
    one = rig()
    Path(one.file.path).unlink()
    one.load(b"v" * MIB)
    one.write(0, MIB).wait()
    one.load(bytes(MIB))
    one.read(0, MIB).wait()
    assert one.memory(0, MIB) == b"v" * MIB
    with pytest.raises(tio.TierIOError, match="No such file"):
        tio.StorageFile.open(one.file.path)


HUGE = 1 << 70


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("value", [1.5, HUGE, "4", None])
def test_what_is_no_whole_number_in_range_is_refused(
    rig: RigMaker, position: int, value: object
) -> None:
    """At the submit, and the engine goes on: nothing of it may reach a thread."""
    made = rig()
    move = [made.file.fd, 0, made.buffer.address, 4096]
    good = tuple(move)
    move[position] = value  # type: ignore[call-overload]
    error = ValueError if value == HUGE else TypeError
    with pytest.raises(error):
        made.engine.submit_many(made.queue, tio.Op.READ, [good, tuple(move)])
    made.engine.submit(made.queue, tio.Op.READ, *good).wait(30)


@pytest.mark.parametrize("backend", ["threads"])
def test_a_surprise_in_a_thread_ends_its_request(
    rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that dies would leave the waiter waiting for ever."""
    import tiermem.io.thread_queue

    made = rig()

    def surprise(*_: object) -> int:
        raise RuntimeError("a surprise")

    with monkeypatch.context() as patched:
        patched.setattr(tiermem.io.thread_queue, "_run_chunk", surprise)
        for _ in range(8):  # more than there are threads
            with pytest.raises(OSError, match="Input/output error"):
                made.read(0, 4096).wait(30)
    made.read(0, 4096).wait(30)
