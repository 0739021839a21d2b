"""Precisions over several ranks: the same bits at every stage; an overflow skips the step on all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics_rig import make_net
from ranks import run_ranks
from ranks_rig import Job, assert_same, data, stages, train_all

import tiermem
from tiermem.errors import StateError


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_stage_gives_the_same_bits(size: int, tmp_path: Path) -> None:
    kinds: list[tuple[str, dict[str, Any], float | None]] = [
        ("fp16", {"fp16": {"loss_scale": 512.0}}, None),
        ("fp16", {"fp16": {"initial_scale_power": 10, "loss_scale_window": 2}}, 0.05),
        ("bf16", {"master": "fp32"}, 0.05),
        ("fp32", {"compute_dtype": "fp16"}, None),
    ]
    configs = stages(tmp_path, every=size > 2)
    jobs = [Job({**c, **more}, dtype, clip=clip) for dtype, more, clip in kinds for c in configs]
    for results in run_ranks(train_all, size, jobs, timeout_s=200):
        for first in range(0, len(jobs), len(configs)):
            for job, result in list(zip(jobs, results, strict=True))[first : first + len(configs)]:
                assert_same(result, results[first], job)
                assert not any(result.skipped)


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    fp16 = {"fp16": {"initial_scale_power": 14, "hysteresis": 1}}
    configs = [{**config, **fp16} for config in stages(tmp_path)]
    jobs = [Job(c, "fp16", clip=clip, bad=(1, 1)) for clip in (None, 0.05) for c in configs]
    by_rank = run_ranks(train_all, 2, jobs, timeout_s=200)
    for results in by_rank:
        for index, (job, result) in enumerate(zip(jobs, results, strict=True)):
            assert result.skipped == [False, True, False], job
            assert result.unchanged == [False, True, False], job
            assert result.scales == [16384, 8192, 8192], job
            assert result.values["0.weight.step"] == 2
            assert result.exchanged["VALUES"][0] == job.steps, job  # clipping looks at the same
            assert_same(result, results[index // len(configs) * len(configs)], job)
    for name, value in by_rank[0][0].values.items():
        assert (value == by_rank[1][0].values[name]).all(), name


def test_clipping_exchanges_one_number_a_step(tmp_path: Path) -> None:
    configs = stages(tmp_path)
    jobs = [Job(c, "bf16", clip=clip) for c in configs for clip in (None, 0.05)]
    for results in run_ranks(train_all, 2, jobs, timeout_s=100):
        for job, result in zip(jobs, results, strict=True):
            values = result.exchanged.get("VALUES", (0, 0))
            assert values == ((0, 0) if job.clip is None else (job.steps, 8 * job.steps)), job
            if job.clip is not None:
                for before, after in result.norms:
                    assert before is not None
                    assert after == pytest.approx(min(before, job.clip), rel=1e-4)


def spoil(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.fill_(math.inf)


def diverge(rank: int, size: int, jobs: list[Job]) -> list[str]:
    """Rank 1's gradients of one tensor are never finite: what each rank is told."""
    said = []
    for job in jobs:
        with tiermem.Runtime({"host_memory": "64MiB", "device": "cpu", **job.config}) as runtime:
            model = tiermem.shard(make_net().half(), runtime)
            optimizer = tiermem.optim.AdamW(model.parameters())
            if rank == 1:
                model[2].weight.register_post_accumulate_grad_hook(spoil)
            try:
                for step in range(5):
                    loss = model(data(rank, step, job)).float().square().mean()
                    optimizer.scale(loss).backward()
                    optimizer.step()
            except StateError as error:
                said.append(f"{step}: {error}")
    return said


def test_all_ranks_name_the_tensors(tmp_path: Path) -> None:
    fp16 = {"fp16": {"loss_scale": 4.0, "max_skipped_steps": 3}}
    jobs = [Job({**config, **fp16}, "fp16") for config in stages(tmp_path)[1:]]
    first, second = run_ranks(diverge, 2, jobs, timeout_s=100)
    assert first == second
    assert len(first) == len(jobs)
    for said in first:
        assert said.startswith("2: ")
        assert "those of 2.weight. Remedy" in said
