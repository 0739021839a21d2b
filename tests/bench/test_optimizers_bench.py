"""bench/optimizers.py steps every optimizer, and says what each keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_optimizer(repository: Path, tmp_path: Path, plain_environment: dict[str, str]) -> None:
    short = ("--params", "2M", "--rounds", "1", "--json", "--on", "nvme", "--path", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(repository / "bench" / "optimizers.py"), *short],
        capture_output=True,
        text=True,
        env=plain_environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["optimizers"]
    kept = {name: row["bytes_per_param"] for name, row in found.items()}
    expected = {"AdamW": 8, "Adam": 8, "SGD": 4, "AdamW8bit": 2 + 2 * 4 / 256}
    expected |= {"Tiered(AdamW)": 8, "Tiered(Adagrad)": 4}
    assert kept == pytest.approx(expected, rel=0.02)
    assert all(row["seconds"][1] > 0 for row in found.values())
    assert {name for name, row in found.items() if "over_torch" not in row} == {"AdamW8bit"}
    assert list(tmp_path.iterdir()) == []
