"""Verification finds every kind of wrong content, and says where."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.benchmark import Mode, Plan, Session
from tiermem.benchmark.pattern import Pattern
from tiermem.errors import TierIOError

PAGE = 4096
NBYTES = 16 * PAGE


class Silent:
    def phase(self, text: str) -> None: ...

    def progress(self, runs: float) -> None: ...


def written(pattern: Pattern, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    pattern.fill(memoryview(data), offset)
    return data


def test_what_was_written_last_is_right_and_older_is_not() -> None:
    pattern = Pattern("file", NBYTES, 1)
    first = written(pattern, 2 * PAGE, 3 * PAGE)
    pattern.check(memoryview(first), 2 * PAGE)
    second = written(pattern, 3 * PAGE, PAGE)
    pattern.check(memoryview(first[:PAGE] + second + first[2 * PAGE :]), 2 * PAGE)
    with pytest.raises(TierIOError, match=rf"{PAGE} of {3 * PAGE} bytes .* at offset {3 * PAGE}:"):
        pattern.check(memoryview(first), 2 * PAGE)


@given(st.integers(0, 4 * PAGE - 1), st.integers(1, 255))
def test_one_flipped_byte_is_found_where_it_is(at: int, flip: int) -> None:
    pattern = Pattern("file", NBYTES, 7)
    data = written(pattern, PAGE, 4 * PAGE)
    data[at] ^= flip
    with pytest.raises(TierIOError, match=rf"8 of .* first at offset {PAGE + at // 8 * 8}:") as caught:
        pattern.check(memoryview(data), PAGE)
    assert caught.value.errno == errno.EIO


def test_another_place_and_another_file_are_wrong() -> None:
    pattern, other = Pattern("file", NBYTES, 1), Pattern("other", NBYTES, 2)
    data = written(pattern, 0, PAGE)
    written(pattern, PAGE, PAGE)
    written(other, 0, PAGE)
    for wrong, offset in ((pattern, PAGE), (other, 0)):
        with pytest.raises(TierIOError, match=f"{PAGE} of {PAGE} bytes"):
            wrong.check(memoryview(data), offset)


def test_no_two_pages_share_a_word() -> None:
    pattern = Pattern("file", NBYTES, 3)
    words = np.frombuffer(bytes(written(pattern, 0, NBYTES)), np.uint64)
    again = np.frombuffer(bytes(written(pattern, 0, NBYTES)), np.uint64)
    assert np.unique(np.concatenate([words, again])).size == 2 * words.size


def small_plan(path: Path, *modes: Mode, direct: bool = True) -> Plan:
    return Plan(
        paths=(path,),
        modes=modes,
        block_bytes=(16 << 10,),
        depths=(4,),
        size_bytes=2 << 20,
        runtime=0,
        loops=2,
        verify=True,
        direct=direct,
    )


@pytest.mark.parametrize("direct", [True, False])
def test_a_sound_file_passes(tmp_path: Path, direct: bool) -> None:
    plan = small_plan(tmp_path, Mode.READ, Mode.WRITE, Mode.DUPLEX, direct=direct)
    with Session(plan, Silent(), threading.Event()) as session:
        assert len(list(session.results())) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [Mode.READ, Mode.DUPLEX])
def test_a_corrupt_file_is_found_and_removed(tmp_path: Path, mode: Mode) -> None:
    offset = (512 << 10) + 40
    with (
        pytest.raises(TierIOError, match=f"not what was written, first at offset {offset}:"),
        Session(small_plan(tmp_path, mode), Silent(), threading.Event()) as session,
    ):
        with open(session.places[0].file.path, "r+b") as file:
            os.pwrite(file.fileno(), b"\0", offset)
            os.fsync(file.fileno())
        list(session.results())
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_did_not_arrive_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive keeps the old contents of one page: in the file, the last write is undone."""
    plan = small_plan(tmp_path, Mode.WRITE)
    with Session(plan, Silent(), threading.Event()) as session:
        path = session.places[0].file.path
        old = Path(path).read_bytes()[:PAGE]
        read_back = Session._read_back

        def undo_and_read_back(self: Session, lanes: list[object]) -> None:
            with open(path, "r+b") as file:
                os.pwrite(file.fileno(), old, 0)
                os.fsync(file.fileno())
            read_back(self, lanes)  # type: ignore[arg-type]

        monkeypatch.setattr(Session, "_read_back", undo_and_read_back)
        with pytest.raises(TierIOError, match=f"{PAGE} of .* first at offset 0:"):
            list(session.results())
