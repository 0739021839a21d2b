"""Opening, closing, forking: nothing hangs, nothing leaks, nothing starts after the end."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable

import pytest
from io_rig import CHUNK, MIB, RigMaker, make_engine

import tiermem.io as tio
from tiermem.errors import ConfigError, StateError


def test_close_waits_for_what_is_in_flight(rig: RigMaker) -> None:
    one = rig(16 * MIB)
    requests = [one.read(at, MIB, at=at) for at in range(0, 16 * MIB, MIB)]
    one.engine.close()
    assert all(request.done() for request in requests)
    assert one.memory(0, 16 * MIB) == one.data
    one.engine.close()


def test_submit_after_close(rig: RigMaker) -> None:
    one = rig()
    one.engine.close()
    with pytest.raises(StateError, match="closed"):
        one.read(0, CHUNK)
    with pytest.raises(StateError, match="closed"):
        one.engine.copy(one.buffer.address, one.buffer.address + CHUNK, CHUNK)
    with pytest.raises(StateError, match="closed"):
        one.engine.add_queue(tio.QueueOptions())
    assert one.engine.stats().read_bytes == 0


def test_no_descriptor_leaks(backend: str, tmp_path: object) -> None:
    make_engine(backend).close()
    before = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(60):
        engine = make_engine(backend)
        queue = engine.add_queue(tio.QueueOptions(CHUNK, 2, 2))
        with tio.StorageFile.create(f"{tmp_path}/f", CHUNK, exist_ok=True) as file:
            with tio.aligned_buffer(CHUNK) as buffer:
                engine.submit(queue, tio.Op.READ, file.fd, 0, buffer.address, CHUNK).wait()
            engine.close()
    assert len(os.listdir("/proc/self/fd")) == before
    deadline = time.monotonic() + 10  # a joined thread stays listed for a moment
    while len(os.listdir("/proc/self/task")) > threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_child(action: Callable[[], None]) -> None:
    """Runs ``action`` in a fork; fails when it raises or hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + 20
    status = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(pid, os.WNOHANG)
        status = code if done else None
        time.sleep(0.005)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert status == 0


def test_fork(rig: RigMaker) -> None:
    one = rig(16 * MIB)
    requests = [one.read(0, 16 * MIB) for _ in range(4)]

    def child() -> None:
        with pytest.raises(StateError, match="fork"):
            one.read(0, CHUNK)
        for request in requests:
            try:
                request.wait()
            except StateError as error:
                assert "fork" in str(error)
        requests.clear()
        one.engine.close()
        fresh = make_engine(one.engine.name)
        queue = fresh.add_queue(tio.QueueOptions())
        fresh.submit(queue, tio.Op.READ, one.file.fd, 0, one.buffer.address, CHUNK).wait()
        fresh.close()

    in_child(child)
    for request in requests:
        request.wait()
    one.read(0, CHUNK).wait()
    assert one.memory(0, CHUNK) == one.data[:CHUNK]


@pytest.mark.parametrize(
    "options",
    [
        tio.QueueOptions(chunk_bytes=0),
        tio.QueueOptions(chunk_bytes=4097),
        tio.QueueOptions(read_depth=0),
        tio.QueueOptions(write_depth=1 << 20),
    ],
)
def test_bad_options(engine: tio.Engine, options: tio.QueueOptions) -> None:
    with pytest.raises(ConfigError, match="must be"):
        engine.add_queue(options)


def test_bad_arguments(rig: RigMaker) -> None:
    one = rig()
    with pytest.raises(ValueError, match="there are 1"):
        one.engine.submit(7, tio.Op.READ, one.file.fd, 0, one.buffer.address, 4096)
    with pytest.raises(ValueError, match="negative"):
        one.read(-4096, 4096)


def test_unclosed_engine_warns(backend: str) -> None:
    engine = make_engine(backend)
    engine.add_queue(tio.QueueOptions())
    with pytest.warns(ResourceWarning, match="not closed"):
        del engine


def add_queues(engine: tio.Engine, count: int) -> None:
    for _ in range(count):
        engine.add_queue(tio.QueueOptions(4096, 4096, 4096))


def test_too_many_aio_contexts() -> None:
    """The kernel's limit on asynchronous requests is explained, with the remedy."""
    pytest.importorskip("tiermem._native")
    with open("/proc/sys/fs/aio-max-nr", encoding="ascii") as file:
        limit = int(file.read())
    if limit > 1 << 17:
        pytest.skip(f"fs.aio-max-nr is {limit}: too many to use up in a test")
    engine = make_engine("libaio")
    try:
        with pytest.raises(OSError, match=r"fs\.aio-max-nr"):
            add_queues(engine, limit // 8192 + 1)
    finally:
        engine.close()


def test_backends_are_probed(tmp_path: object) -> None:
    results = tio.probe_backends(str(tmp_path))
    assert results["threads"] == "works"
    with tio.open_engine("auto", str(tmp_path)) as engine:  # type: ignore[attr-defined]
        assert results[engine.name] == "works"
        assert engine.name in engine.reason
    with pytest.raises(ConfigError, match="must be one of"):
        tio.open_engine("io_uringg")


def test_unusable_directory() -> None:
    assert "No such file" in tio.probe_backends("/nonexistent")["threads"]
    with pytest.raises(ConfigError, match="no I/O backend works in /nonexistent"):
        tio.open_engine("auto", "/nonexistent")


def test_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, tiermem.io; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
