"""Every argument that cannot work is one message with value, limit and remedy."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_rig import SMALL, left_in

from tiermem.cli.app import run
from tiermem.io import QueueOptions
from tiermem.io.threads import ThreadsEngine

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs the command in an empty directory; its exit code and stderr in one line."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "200")):
        monkeypatch.setenv(name, value)

    def call(*arguments: str) -> tuple[int, str]:
        code = run(["bench", *arguments])
        return code, " ".join(capsys.readouterr().err.split())

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent",), "path 'absent' does not exist; create the directory"),
        (("file",), "path 'file' is not a directory"),
        ((".", "--block-size", "1000"), "block size is 1000 bytes; it must be a multiple of 4096"),
        ((".", "--block-size", "0"), "block size is 0 bytes"),
        ((".", "--block-size", "2GiB"), "up to 1.0 GiB"),
        ((".", "--depth", "0"), "depth is 0; it must be 1 to 4096"),
        ((".", "--depth", "5000"), "depth is 5000"),
        ((".", "--threads", "0"), "threads is 0; it must be 1 to 16"),
        ((".", "--loops", "0"), "loops is 0; it must be 1 to"),
        ((".", "--runtime", "-1"), "runtime is -1 s; it must be 0"),
        ((".", "--runtime", "nan"), "runtime is nan s"),
        ((".", "--size", "4097"), "size is 4097 bytes; it must be a positive multiple of 4096"),
        ((".", "--size", "0"), "size is 0 bytes"),
        ((".", "--size", "1MiB"), "raise --size or lower --block-size"),
        ((".", "--size", "900TiB"), "are free; free some, give another path or a smaller --size"),
        ((".", "--block-size", "1GiB", "--depth", "4096", "--size", "900TiB"), "available memory may"),
        ((".", "--backend", "spdk"), "backend is 'spdk'; it must be one of auto, io_uring"),
        ((".", "--plot", "speed.svg"), "must end with .png"),
        ((".", "--plot", "absent/speed.png"), "is not a directory"),
        ((".", "--depth", "0", "--loops", "0"), "depth is 0; it must be 1 to 4096; loops is 0"),
    ],
)
def test_one_message_and_exit_code_1(
    run_bench: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    code, error = run_bench(*arguments)
    assert code == 1, error
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error
    assert left_in(tmp_path) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument"),
        ((".", "--block-size", "big"), "'big' is not a size such as"),
        ((".", "--size", "-4096"), "is not a size"),
        ((".", "--depth", "1,x"), "'1,x' is not a list of whole numbers"),
        ((".", "--mode", "erase"), "'erase' is not a list of read, write and duplex"),
        ((".", "--pages", "tiny"), "tiny"),
        ((".", "--nope"), "--nope"),
    ],
)
def test_usage_errors_exit_with_2(run_bench: Run, arguments: tuple[str, ...], message: str) -> None:
    code, error = run_bench(*arguments)
    assert code == 2, error
    assert message in error
    assert "Traceback" not in error


def test_a_directory_that_may_not_be_written(
    run_bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the answer of access(), since root may write everywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    code, error = run_bench(str(tmp_path), *SMALL)
    assert code == 1
    assert "is not writable by user" in error


def test_two_paths_need_room_for_both(run_bench: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    size = int(free * 0.75) // 4096 * 4096
    code, error = run_bench("one", "two", "--size", str(size))
    assert code == 1
    assert "'one', 'two'" in error
    assert f"{2 * size} bytes" in error


def test_a_picture_without_matplotlib(run_bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, error = run_bench(".", "--plot", "speed.png")
    assert code == 1
    assert "pip install '.[plot]'" in error


def test_what_was_measured_before_a_failure_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second setting gets no queue, as where fs.aio-max-nr is exhausted."""
    real = ThreadsEngine.add_queue

    def add_queue(self: ThreadsEngine, options: QueueOptions) -> int:
        if options.read_depth == 64:
            raise OSError(errno.EAGAIN, "the kernel has no room for 64 more")
        return real(self, options)

    monkeypatch.setattr(ThreadsEngine, "add_queue", add_queue)
    small = ("--size", "8MiB", "--block-size", "16KiB", "--runtime", "0", "--loops", "1")
    code = run(["bench", str(tmp_path), *small, "--depth", "4,64", "--backend", "threads", "--json"])
    said = capsys.readouterr()
    assert code == 1
    assert "error: depth is 64: the kernel has no room" in said.err
    assert len(json.loads(said.out)["results"]) == 3
    assert left_in(tmp_path) == []
