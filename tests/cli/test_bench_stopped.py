"""The files go in every case: Ctrl-C, a kill that can be caught, and one that cannot."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from bench_rig import ENDLESS, SMALL, bench_json, command, left_in, running

Environment = dict[str, str]


def endless(path: Path, *more: object) -> list[str]:
    return command(path, *ENDLESS, *more)


@pytest.mark.parametrize(
    ("number", "delay"),
    [(signal.SIGINT, 0.0), (signal.SIGINT, 0.6), (signal.SIGTERM, 0.3), (signal.SIGHUP, 0.3)],
)
def test_a_signal_ends_it_and_removes_its_files(
    tmp_path: Path, plain_environment: Environment, number: signal.Signals, delay: float
) -> None:
    with running(endless(tmp_path, "--json"), tmp_path, plain_environment) as process:
        time.sleep(delay)  # in the warm-up, and in a run
        process.send_signal(number)
        out, error = process.communicate(timeout=30)
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error
    assert json.loads(out)["stopped"] is True
    assert left_in(tmp_path) == []


def test_what_was_measured_before_is_shown(tmp_path: Path, plain_environment: Environment) -> None:
    more = ("--json", "--runtime", "0.2", "--loops", "1000", "--mode", "read")
    with running(endless(tmp_path, *more), tmp_path, plain_environment) as process:
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    found = json.loads(out)
    assert 1 <= found["results"][0]["runs"] < 1000


def test_the_next_run_reclaims_what_a_kill_left(tmp_path: Path, plain_environment: Environment) -> None:
    with running(endless(tmp_path), tmp_path, plain_environment) as process:
        process.kill()
        process.wait()
    left = left_in(tmp_path)
    assert len(left) == 1
    found = bench_json(plain_environment, tmp_path, *SMALL, "--mode", "read")
    assert found["reclaimed"] == [str(left[0])]
    assert left_in(tmp_path) == []


def test_a_live_run_is_not_touched(tmp_path: Path, plain_environment: Environment) -> None:
    with running(endless(tmp_path), tmp_path, plain_environment) as process:
        found = bench_json(plain_environment, tmp_path, *SMALL, "--mode", "read")
        assert found["reclaimed"] == []
        assert list(tmp_path.glob("*/gen0.bin"))
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert left_in(tmp_path) == []
