"""Ranks whose drives and updates take different times make the same exchanges; see
[Note: deterministic room] and [Note: commitments]."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from rank_rig import Trained, assert_same, train
from ranks import run_ranks

from tiermem.store.transfer import Transfer
from tiermem.zero.update import UpdatePipeline

BASE = {"persistence_threshold_numel": 1000, "host_memory": "64MiB", "device": "cpu", "stage": 3}


def train_unevenly(rank: int, size: int, seeds: range, path: str) -> list[Trained]:
    """One training run per seed, with delays at random in the middle of everything."""
    apply, done = UpdatePipeline._apply, Transfer.done
    source = random.Random()

    def slow_apply(self: UpdatePipeline, piece: Any) -> None:
        if source.random() < 0.3:
            time.sleep(source.random() * 0.01)
        apply(self, piece)

    def late(self: Transfer) -> bool:
        return source.random() < 0.5 and done(self)

    UpdatePipeline._apply, Transfer.done = slow_apply, late  # type: ignore[method-assign]
    nvme = {"params": "nvme", "optimizer": "nvme", "paths": [path], "resident_memory": 0}
    results = []
    try:
        for seed in seeds:
            choice = random.Random(seed)  # alike on all ranks
            source.seed(1000 * seed + rank)
            config = {**BASE, **choice.choice([nvme, {"optimizer": "device"}, nvme])}
            config["sub_group_numel"] = 4096
            config["prefetch_bytes"] = choice.choice([0, 30_000, 60_000, 200_000])
            if choice.random() < 0.5:
                config["max_live_numel"] = choice.choice([1, 20_000, 40_000])
            if choice.random() < 0.5:
                config["max_reuse_numel"] = choice.choice([0, 10_000, 30_000])
            if choice.random() < 0.4:
                config |= {
                    "update": "backward",
                    "gradient_accumulation_steps": 1,
                    "gradient_clipping": 0,
                }
            results.append(train(rank, size, config, steps=4))
    finally:
        UpdatePipeline._apply, Transfer.done = apply, done  # type: ignore[method-assign]
    return results


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_ranks_at_different_speeds(seeds: range, tmp_path: Path) -> None:
    for results in run_ranks(train_unevenly, 3, seeds, str(tmp_path), timeout_s=60 + 10 * len(seeds)):
        for result in results:
            assert_same(result, results[0])
