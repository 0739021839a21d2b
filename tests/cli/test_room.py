"""What has no room is refused from its sizes alone, at once, with the figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tiermem.cli import room
from tiermem.cli.job import ModelSize, TrainJob
from tiermem.cli.room import check_room
from tiermem.cli.training import resolve_size
from tiermem.errors import BudgetError, ConfigError
from tiermem.memory.budget import HostMemory

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB of memory, a drive with 10 GiB."""
    memory = HostMemory(16 * GIB, 16 * GIB, None, None, "machine")
    monkeypatch.setattr(room, "available_host_memory", lambda: memory)
    space = os.statvfs_result((4096, 4096, 0, 0, 10 * GIB // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: space)


def check(tmp_path: Path, parameters: int, *, batch_size: int = 1, **settings: Any) -> None:
    values = {"host_memory": GIB, "device": "cpu", "paths": [str(tmp_path)], **settings}
    job = TrainJob(
        size=ModelSize(parameters, None, None, None, 1024),
        files=(),
        batch_size=batch_size,
        sequence_length=256,
        steps=1,
        learning_rate=1e-3,
        cosine=False,
        warmup=0,
        weight_decay=0.0,
        seed=0,
        check=False,
        as_json=False,
        config_file=None,
        settings=values,
    )
    check_room(job, job.tier_config(), resolve_size(job.size))


def test_what_has_room_passes(tmp_path: Path) -> None:
    check(tmp_path, 900_000_000)  # 10.1 GiB, 1 of them in host memory
    check(tmp_path, 900_000_000, resident_memory=GIB, path_weights=[2.0])
    check(tmp_path, 1_200_000_000, params="host", optimizer="host", host_memory=15 * GIB)


def test_a_full_drive(tmp_path: Path) -> None:
    message = r"need 1[0-9.]+ GiB on .*10\.0 GiB \(\d+ bytes\) are free.*--params.*--path"
    with pytest.raises(BudgetError, match=message):
        check(tmp_path, 1_200_000_000)
    with pytest.raises(BudgetError, match=message):  # nothing of it may stay in host memory
        check(tmp_path, 980_000_000, resident_memory=0)
    with pytest.raises(BudgetError, match=r"TiB on"):
        check(tmp_path, 10**29)


def test_two_paths_on_one_drive_share_it(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with pytest.raises(BudgetError, match=r"on \S+/a, \S+/b beside"):
        check(tmp_path, 1_200_000_000, paths=list(map(str, paths)))


def test_what_a_dead_run_left_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "dead_bytes", lambda path: 4 * GIB)
    check(tmp_path, 1_200_000_000)


@pytest.mark.parametrize("key", ["params", "optimizer"])
@pytest.mark.parametrize("tier", ["host", "device"])
def test_too_little_memory(tmp_path: Path, key: str, tier: str) -> None:
    with pytest.raises(
        BudgetError, match=r"of memory for what is not on nvme; 16\.0 GiB.*--params-on nvme"
    ):
        check(tmp_path, 900 * 10**12, **{key: tier})


@pytest.mark.parametrize("precision", ["bf16", "fp32", None])
def test_activations(tmp_path: Path, precision: str | None) -> None:
    check(tmp_path, 100_000_000, batch_size=64, compute_dtype=precision)
    with pytest.raises(BudgetError, match=r"300 x 256 bytes keeps \d.*GiB.*15\.0 GiB.*--batch-size"):
        check(tmp_path, 100_000_000, batch_size=300, compute_dtype=precision)
    with pytest.raises(BudgetError, match="TiB of activations"):
        check(tmp_path, 100_000_000, batch_size=100_000_000, compute_dtype=precision)


def test_missing_paths_are_named_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        check(tmp_path, 10**15, paths=[str(tmp_path / "absent")])
