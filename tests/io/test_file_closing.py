"""Closing, forking and dropping files: what has not begun is cancelled, nothing leaks or hangs."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
from file_rig import delay_next, open_or_skip, random_file
from io_rig import make_engine
from test_io_lifetime import in_child

import tiermem.io as tio
from tiermem.errors import StateError

BLOCK = 4096
ONE_AT_A_TIME = tio.QueueOptions(BLOCK, 1, 1)


def results(requests: list[tio.Transfer]) -> list[int]:
    """For each its errno, or 0."""
    codes = []
    for request in requests:
        try:
            request.wait(0)
            codes.append(0)
        except tio.TierIOError as error:
            codes.append(error.errno or -1)
    return codes


def test_close_in_flight(tmp_path: Path, backend: str) -> None:
    """The first has begun and ends well; those behind it are cancelled and say so."""
    data = random_file(tmp_path / "f", 40 * BLOCK)
    file = open_or_skip(backend, tmp_path / "f", direct=False, options=ONE_AT_A_TIME)
    delay_next(file, tio.Op.READ)
    memory = [bytearray(BLOCK) for _ in range(40)]
    requests = [file.read_into(memory[at], at * BLOCK) for at in range(40)]
    while backend == "threads" and not file.engine._queues[0]._in_flight:  # type: ignore[attr-defined]
        pass
    begun = not requests[0].done()
    file.close()
    codes = results(requests)
    assert begun
    assert codes.count(errno.ECANCELED) >= 30  # those refused and tried again count as begun
    for at, code in enumerate(codes):
        assert code in (0, errno.ECANCELED)
        assert memory[at] == (bytes(BLOCK) if code else data[at * BLOCK : (at + 1) * BLOCK])
    with pytest.raises(tio.TierIOError, match="closed before all of it had begun"):
        requests[-1].wait()
    with pytest.raises(StateError, match="is closed"):
        file.read_into(bytearray(1), 0)
    with pytest.raises(StateError, match="is closed"):
        file.flush()
    file.close()


def test_a_request_that_had_begun_is_cancelled_in_part(tmp_path: Path, backend: str) -> None:
    random_file(tmp_path / "f", 400 * BLOCK)
    file = open_or_skip(backend, tmp_path / "f", direct=False, options=ONE_AT_A_TIME)
    delay_next(file, tio.Op.READ)
    request = file.read_into(bytearray(400 * BLOCK), 0)
    while backend == "threads" and not file.engine._queues[0]._in_flight:  # type: ignore[attr-defined]
        pass
    file.close()
    assert results([request]) in ([errno.ECANCELED], [0])  # 0: all had been cut already


def test_cancelled_and_not_waited_for_is_logged(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_or_skip(backend, tmp_path / "f", "w", direct=False, options=ONE_AT_A_TIME) as file:
        delay_next(file, tio.Op.WRITE)
        requests = [file.write_from(bytes(BLOCK), at * BLOCK) for at in range(20)]
    with caplog.at_level(logging.ERROR, "tiermem"):
        requests.clear()
        gc.collect()
    assert "nobody waited for a transfer that failed" in caplog.text
    assert "canceled" in caplog.text.lower()


def test_closing_from_many_threads(tmp_path: Path, backend: str) -> None:
    random_file(tmp_path / "f", 100 * BLOCK)
    for _ in range(10):
        file = open_or_skip(backend, tmp_path / "f")
        requests: list[tio.Transfer] = []
        errors: list[BaseException] = []

        def submit(file: tio.AsyncFile = file, into: list[tio.Transfer] = requests) -> None:
            try:
                for at in range(100):
                    into.append(file.read_into(bytearray(BLOCK), at * BLOCK))
            except StateError:
                pass

        def close(file: tio.AsyncFile = file, errors: list[BaseException] = errors) -> None:
            try:
                file.close()
                assert file.closed
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=action) for action in (submit, close, submit, close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert set(results(requests)) <= {0, errno.ECANCELED}


def test_a_closed_engine_refuses_to_cancel(backend: str) -> None:
    engine = make_engine(backend)
    queue = engine.add_queue(tio.QueueOptions())
    engine.cancel(queue)  # of nothing
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.cancel(queue)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_leaks(tmp_path: Path, backend: str) -> None:
    random_file(tmp_path / "f", 10_000)
    open_or_skip(backend, tmp_path / "f").close()
    before = descriptors()
    for _ in range(10):
        with open_or_skip(backend, tmp_path / "f") as file:
            file.write_from(b"1" * 9000, 100).wait()
            file.flush()
            assert not any(os.get_inheritable(fd) for fd in (file._descriptors.cached,))
        with pytest.raises(tio.TierIOError):
            tio.open_file(tmp_path / "absent", backend=backend)
        with pytest.raises(tio.ConfigError):
            tio.open_file(tmp_path / "f", backend=backend, options=tio.QueueOptions(1))
        with pytest.raises(tio.TierIOError):
            tio.open_file(tmp_path, backend=backend)
    assert descriptors() == before


def test_a_dropped_file_warns_and_is_closed(tmp_path: Path, backend: str) -> None:
    random_file(tmp_path / "f", 10_000)
    open_or_skip(backend, tmp_path / "f").close()
    before = descriptors()
    file = open_or_skip(backend, tmp_path / "f")
    memory = bytearray(9000)
    request = file.read_into(memory, 0)
    del file  # the request needs it, until it has ended
    with pytest.warns(ResourceWarning, match="f was not closed"):
        request.wait()
    assert descriptors() == before
    assert memory == (tmp_path / "f").read_bytes()[:9000]


def test_a_file_dropped_with_its_request(tmp_path: Path, backend: str) -> None:
    """Whatever thread the last reference dies in."""
    random_file(tmp_path / "f", 10_000)
    open_or_skip(backend, tmp_path / "f").close()
    before = descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(5):
            file = open_or_skip(backend, tmp_path / "f")
            delay_next(file, tio.Op.READ)
            request = file.read_into(bytearray(9000), 0)
            del file, request
        deadline = time.monotonic() + 30
        while descriptors() > before and time.monotonic() < deadline:
            time.sleep(0.01)
    assert descriptors() == before


def test_the_users_descriptor_does_not_matter(tmp_path: Path, backend: str) -> None:
    """The file stays open whatever becomes of the path and of other descriptors."""
    data = random_file(tmp_path / "f", 10_000)
    with open(tmp_path / "f", "rb") as other, open_or_skip(backend, tmp_path / "f") as file:
        other.close()
        (tmp_path / "f").unlink()
        memory = bytearray(10_000)
        file.read_into(memory, 0).wait()
        assert memory == data


def test_fork(tmp_path: Path, backend: str) -> None:
    data = random_file(tmp_path / "f", 100_000)
    with open_or_skip(backend, tmp_path / "f") as file:
        delay_next(file, tio.Op.READ)
        memory = bytearray(100_000)
        request = file.read_into(memory, 0)

        def child() -> None:
            with pytest.raises(StateError, match="fork"):
                file.read_into(bytearray(1), 0)
            for action in (request.wait, file.flush, lambda: file.nbytes):
                with pytest.raises(StateError, match="fork"):
                    action()
            file.close()
            with tio.open_file(tmp_path / "f", backend=backend) as fresh:
                mine = bytearray(100)
                fresh.read_into(mine, 50).wait()
                assert mine == data[50:150]

        in_child(child)
        request.wait()
        assert memory == data
