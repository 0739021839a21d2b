"""Ctrl-C and kills end a tuning early; its files go, and no profile is made of half a measurement."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from bench_rig import left_in, running
from tune_rig import Environment, command


@pytest.mark.parametrize(
    ("number", "delay"),
    [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.5), (signal.SIGHUP, 1.5)],
)
def test_a_signal_ends_it_and_removes_its_files(
    tmp_path: Path, plain_environment: Environment, number: signal.Signals, delay: float
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    file = tmp_path / "profile.json"
    line = command(drive, "--size", "128MiB", "--budget", "1h", "--json", "--save", file)
    with running(line, drive, plain_environment) as process:
        time.sleep(delay)
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error
    found = json.loads(out)
    assert found["stopped"] is True
    assert found["profile"] is None
    assert not file.exists()
    assert left_in(drive) == []
