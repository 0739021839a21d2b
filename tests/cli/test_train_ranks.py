"""`tiermem train` under torchrun: each rank its own rows of the batch and its own path; one shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiermem.cli.ranks import Ranks, find_ranks, path_of_rank
from tiermem.errors import ConfigError

SMALL = ["--layers", "2", "--hidden", "64", "--sequence-length", "64", "--host-memory", "64MiB"]


def start(ranks: int, path: Path, *options: str) -> subprocess.Popen[str]:
    text = path / "text"
    text.write_bytes(bytes(range(32, 127)) * 100)
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "tiermem.cli", "train", str(text), *SMALL, *options, "--json"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def run(ranks: int, path: Path, *options: str) -> dict[str, Any]:
    process = start(ranks, path, *options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)  # the first rank's only


def test_two_ranks_train_as_one_with_both_batches(tmp_path: Path) -> None:
    for name in ("drive0", "drive1"):
        (tmp_path / name).mkdir()
    options = ["--steps", "4", "--path", f"{tmp_path}/drive{{local_rank}}", "--precision", "fp32"]
    two = run(2, tmp_path, *options, "--batch-size", "2", "--check", "--clip", "0.5")
    one = run(1, tmp_path, *options, "--batch-size", "4", "--clip", "0.5")
    assert two["tokens_per_step"] == one["tokens_per_step"] == 4 * 64
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["losses_largest_difference"] < 1e-5
    assert not list(tmp_path.glob("drive*/tiermem-run-*"))


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    """torchrun passes a SIGINT on to its ranks, whom it reaches in different steps."""
    options = ["--steps", "100000", "--path", str(tmp_path), "--batch-size", "1", "--stage", "2"]
    process = start(2, tmp_path, *options)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    time.sleep(0.2)
    ranks = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "disagree" not in err
    assert json.loads(out)["stopped"] is True
    assert not list(tmp_path.glob("tiermem-run-*"))


def test_places() -> None:
    assert find_ranks({}) == Ranks(0, 1, 0)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    address = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    ranks = find_ranks({**torchrun, **address})
    assert ranks == Ranks(5, 8, 1)
    assert path_of_rank("/nvme{local_rank}/{rank}", ranks) == "/nvme1/5"
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT are not set"):
        find_ranks(torchrun)
    with pytest.raises(ConfigError, match="must be numbers"):
        find_ranks({**torchrun, **address, "RANK": "x"})
