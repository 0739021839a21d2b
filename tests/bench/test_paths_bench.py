"""bench/paths.py measures two directories and leaves nothing in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_two_directories(repository: Path, tmp_path: Path, plain_environment: dict[str, str]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    short = ("--pairs", "1", "--seconds", "0.1", "--json", "--paths", *map(str, paths))
    done = subprocess.run(
        [sys.executable, str(repository / "bench" / "paths.py"), *short],
        capture_output=True,
        text=True,
        env=plain_environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert all(str(path) in found["used"] for path in paths)
    given = found["given"]
    striped, alone = given["striped_gb_per_s"][1], [each[1] for each in given["alone_gb_per_s"]]
    assert given["sum_ratio"][1] == pytest.approx(striped / sum(alone), rel=0.01)
    assert sum(each[1] for each in given["weights"]) == pytest.approx(1.0, abs=1e-3)
    assert 0 <= given["finish_gap"][0] <= given["finish_gap"][2] < 1
    assert [entry for path in paths for entry in path.iterdir()] == []
