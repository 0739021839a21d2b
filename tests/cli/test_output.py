"""A standard output that cannot be written is one message, a reader that has left is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench_rig import SMALL

TRAIN = (
    *("train", "--layers", "1", "--hidden", "64", "--steps", "1", "--sequence-length", "16"),
    *("--params-on", "host", "--optimizer-on", "host", "--host-memory", "16MiB"),
)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [TRAIN, (*TRAIN, "--json"), ("--help",)])
def test_a_full_output(
    plain_environment: dict[str, str], arguments: tuple[str, ...], unbuffered: str
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tiermem.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=plain_environment | {"PYTHONUNBUFFERED": unbuffered},
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: cannot write to standard output: No space left on device"
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_reader_that_has_left(plain_environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tiermem.cli", *TRAIN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 1
    assert said == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_output_without_some_characters(
    tmp_path: Path, plain_environment: dict[str, str], encoding: str
) -> None:
    """Those of tables, and names of files that are no text."""
    drive = Path(os.fsdecode(os.fsencode(tmp_path) + b"/drive\xff"))
    drive.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tiermem.cli", "bench", drive, *SMALL],
        capture_output=True,
        env=plain_environment | {"PYTHONIOENCODING": f"{encoding}:strict"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert b"duplex write" in done.stdout
    assert b"drive?" in done.stdout
