"""Invariant 1 over several ranks: stage, placement, budget and prefetch change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_rig import Trained, assert_same, train
from ranks import run_ranks

SMALL = {"persistence_threshold_numel": 1000, "host_memory": "64MiB", "device": "cpu"}


Job = tuple[dict[str, Any], dict[str, Any]]


def train_all(rank: int, size: int, jobs: list[Job]) -> list[Trained]:
    results = []
    for config, options in jobs:
        try:
            results.append(train(rank, size, {**SMALL, **config}, **options))
        except Exception as error:
            raise AssertionError(f"{config}, {options}") from error
    return results


def placements(path: Path) -> list[dict[str, Any]]:
    nvme = {"optimizer": "nvme", "paths": [str(path)], "resident_memory": 0}
    return [
        *({"stage": stage, "optimizer": "device"} for stage in (0, 1, 2, 3)),
        {"stage": 1, "optimizer": "host", "contiguous_gradients": False, "reduce_bucket_numel": 4096},
        {"stage": 0, **nvme},
        {"stage": 2, **nvme},
        {"stage": 3, "params": "nvme", **nvme},
        {"stage": 3, "params": "nvme", **nvme, "prefetch_bytes": 0, "sub_group_numel": 4096},
        {"stage": 3, "params": "host", "optimizer": "nvme", "paths": [str(path)]},
        {"stage": 3, "params": "nvme", **nvme, "max_reuse_numel": 0, "max_live_numel": 10_000},
    ]


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_stage_and_placement(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    configs = placements(tmp_path)
    for clip in (None, 0.05):
        jobs = [(config, {"clip": clip, "dtype": dtype}) for config in configs]
        by_rank = run_ranks(train_all, size, jobs, timeout_s=200)
        for results in by_rank:
            for config, result in zip(configs, results, strict=True):
                try:
                    assert_same(result, results[0])
                except AssertionError as error:
                    raise AssertionError(f"{config}, clip {clip}") from error
            for name, value in results[0].params.items():
                assert np.array_equal(value, by_rank[0][0].params[name]), name


def test_update_in_backward(tmp_path: Path) -> None:
    once = {"gradient_accumulation_steps": 1, "gradient_clipping": 0}
    configs = [{}, *({**config, "update": "backward", **once} for config in placements(tmp_path))]
    jobs: list[Job] = [(config, {}) for config in configs]
    for results in run_ranks(train_all, 2, jobs, timeout_s=200):
        for config, result in zip(configs, results, strict=True):
            try:
                assert_same(result, results[0])
            except AssertionError as error:
                raise AssertionError(str(config)) from error


@pytest.mark.parametrize("declared", [None, 3])
def test_micro_steps(declared: int | None, tmp_path: Path) -> None:
    """Stages that reduce at the same times agree: 0 and 1; 2 and 3; all where nothing is declared."""
    configs = [{**c, "gradient_accumulation_steps": declared} for c in placements(tmp_path)]
    jobs: list[Job] = [(config, {"micro_steps": 3, "clip": 0.05}) for config in configs]
    for results in run_ranks(train_all, 2, jobs, timeout_s=200):
        for config, result in zip(configs, results, strict=True):
            late = declared is not None and config["stage"] < 2
            like = next(
                i for i, c in enumerate(configs) if late == (declared is not None and c["stage"] < 2)
            )
            try:
                assert_same(result, results[like])
            except AssertionError as error:
                raise AssertionError(str(config)) from error
