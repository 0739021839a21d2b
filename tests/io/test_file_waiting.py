"""Waiting for one, some or all, with time-outs, from several threads, without the GIL."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from file_rig import delay_next, open_or_skip, random_file

import tiermem.io as tio

SIZE = 1 << 20


def test_one(tmp_path: Path, backend: str) -> None:
    random_file(tmp_path / "f", SIZE)
    with open_or_skip(backend, tmp_path / "f") as file:
        delay_next(file, tio.Op.READ)
        request = file.read_into(bytearray(100), 0)
        assert not request.done()
        assert "in flight" in repr(request)
        with pytest.raises(TimeoutError, match=r"read of 100 bytes at offset 0 of .* after 0\.01 s"):
            request.wait(0.01)
        request.wait()
        request.wait(0)
        assert request.done()
        assert (request.offset, request.length) == (0, 100)


def test_some(tmp_path: Path, backend: str) -> None:
    """Of two files, the one that is not held up is there first."""
    random_file(tmp_path / "slow", SIZE)
    random_file(tmp_path / "fast", SIZE)
    with (
        open_or_skip(backend, tmp_path / "slow") as slow,
        open_or_skip(backend, tmp_path / "fast") as fast,
    ):
        delay_next(slow, tio.Op.READ)
        late = slow.read_into(bytearray(100), 0)
        early = [fast.read_into(bytearray(SIZE), 0) for _ in range(2)]
        assert tio.wait([late, *early], count=0)[0] in ([], early[:1], early[1:], early)
        assert tio.wait([late, *early], count=2) == (early, [late])
        with pytest.raises(TimeoutError, match="2 of 3 transfers are complete after 0"):
            tio.wait([late, *early], timeout=0)
        with pytest.raises(TimeoutError, match="2 of 3"):
            tio.wait([late, *early], timeout=0.01, count=3)
        assert tio.wait([late, *early]) == ([late, *early], [])
        assert tio.wait([]) == ([], [])
        for count in (-1, 2):
            with pytest.raises(ValueError, match="count is"):
                tio.wait([late], count=count)


def test_failures_are_raised_after_the_others_ended(tmp_path: Path, backend: str) -> None:
    random_file(tmp_path / "f", SIZE)
    with open_or_skip(backend, tmp_path / "f", direct=False) as file:
        file.engine.inject(tio.Fault(tio.Op.READ, 1, tio.FaultKind.ERROR, errno.ENOMEM))
        requests = [file.read_into(bytearray(4096), at * 4096) for at in range(20)]
        with pytest.raises(tio.TierIOError, match="Cannot allocate memory") as caught:
            tio.wait(requests)
        assert all(request.done() for request in requests)
        failed = [at for at, request in enumerate(requests) if failure_of(request)]
        assert len(failed) == 1
        assert caught.value.context.offset == 4096 * failed[0]


def failure_of(request: tio.Transfer) -> OSError | None:
    try:
        request.wait()
    except OSError as error:
        return error
    return None


@pytest.mark.parametrize("part", [0, 1, 2])
def test_each_part_of_an_unaligned_transfer_may_fail(tmp_path: Path, backend: str, part: int) -> None:
    random_file(tmp_path / "f", SIZE)
    with open_or_skip(backend, tmp_path / "f") as file, tio.aligned_buffer(SIZE) as buffer:
        for op, start in ((tio.Op.READ, file.read_into), (tio.Op.WRITE, file.write_from)):
            file.engine.inject(tio.Fault(op, part, tio.FaultKind.ERROR, errno.EIO))
            request = start(buffer.view[100:20_100], 100)
            if len(request._parts) != 3:
                pytest.skip("the file system has no O_DIRECT")
            with pytest.raises(tio.TierIOError, match="Input/output error"):
                request.wait()
            start(buffer.view[100:20_100], 100).wait()


def test_flush_waits_and_reports(tmp_path: Path, backend: str) -> None:
    with open_or_skip(backend, tmp_path / "f", "w") as file:
        delay_next(file, tio.Op.WRITE)
        request = file.write_from(b"x" * 10_001, 3)
        file.flush()
        assert request.done()
        file.engine.inject(tio.Fault(tio.Op.WRITE, 0, tio.FaultKind.ERROR, errno.ENOSPC))
        request = file.write_from(b"y" * 100, 0)
        with pytest.raises(tio.TierIOError, match="No space left") as caught:
            file.flush()
        assert caught.value.errno == errno.ENOSPC
        file.flush()


def test_the_gil_is_released(tmp_path: Path, backend: str) -> None:
    """While one thread waits, another one computes."""
    random_file(tmp_path / "f", SIZE)
    with open_or_skip(backend, tmp_path / "f") as file:
        delay_next(file, tio.Op.READ)
        request = file.read_into(bytearray(SIZE), 0)
        ended, turns = threading.Event(), 0

        def wait() -> None:
            tio.wait([request])
            ended.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        while not ended.is_set():
            turns += 1
        waiter.join()
        assert turns > 1000


def test_many_threads(tmp_path: Path, backend: str) -> None:
    """Threads write and read their own parts; each waits for the requests of another, too."""
    part, count = 70_001, 6
    errors: list[BaseException] = []
    shared: list[tio.Transfer] = []
    with open_or_skip(backend, tmp_path / "f", "w") as file:

        def work(number: int) -> None:
            try:
                rng = np.random.default_rng(number)
                for turn in range(5):
                    mine = rng.integers(0, 256, part, np.uint8)
                    request = file.write_from(mine, number * part)
                    shared.append(request)
                    tio.wait(shared[-3:])
                    request.wait()
                    back = np.zeros_like(mine)
                    file.read_into(back, number * part).wait()
                    assert (back == mine).all(), (number, turn)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert file.nbytes == count * part


def test_a_time_limit_holds_for_all_together(tmp_path: Path, backend: str) -> None:
    random_file(tmp_path / "f", SIZE)
    with open_or_skip(backend, tmp_path / "f", direct=False) as file:
        delay_next(file, tio.Op.READ)
        requests = [file.read_into(bytearray(100), 0)]
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            tio.wait(requests * 50, timeout=0.05)
        spent = time.monotonic() - begin
        requests[0].wait()
        assert spent < 50 * 0.05  # not one limit for each of them
