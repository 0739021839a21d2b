"""Micro-steps over several ranks: `no_sync`, the precision in which they are added up, volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numerics_rig import make_net
from ranks import run_ranks
from ranks_rig import Job, assert_same, stages, train_all

import tiermem
from tiermem.errors import StateError

MICRO = 3


def reductions(result: Any, job: Job) -> float:
    """How often a rank has sent the other's half of all gradients in a step, in bytes of the
    parameters' precision."""
    itemsize = 4 if job.dtype == "fp32" else 2
    unit = 2 * 4096 // itemsize  # each parameter here is a region, of one page for each rank
    padded = sum(-(-p.numel() // unit) * unit for p in make_net().parameters())
    return float(result.exchanged["GRADIENTS"][1] / job.steps / (itemsize * padded / 2))


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_no_sync_reduces_once(dtype: str, tmp_path: Path) -> None:
    """It is the accumulation of stage 1 with declared micro-steps, at every stage."""
    configs = stages(tmp_path)
    declared = {**configs[1], "gradient_accumulation_steps": MICRO}
    late = Job(declared, dtype, steps=2, micro_steps=MICRO, clip=0.05)
    every = [Job(c, dtype, steps=2, micro_steps=MICRO, clip=0.05) for c in configs]
    once = [Job(c, dtype, steps=2, micro_steps=MICRO, clip=0.05, no_sync=True) for c in configs]
    wide = 1 if dtype == "fp32" else 2  # sums are fp32
    for results in run_ranks(train_all, 2, [late, *every, *once], timeout_s=200):
        reference, results = results[0], results[1:]
        for job, result in zip(every, results[: len(every)], strict=True):
            # Stage 0 exchanges the sums too, which are fp32 from the second micro-step on.
            sums = 1 + (MICRO - 1) * wide if job.config["stage"] == 0 else 0
            assert reductions(result, job) == MICRO + sums, job
        for job, result in zip(once, results[len(every) :], strict=True):
            assert_same(result, reference, job)
            assert reductions(result, job) == wide * (2 if job.config["stage"] == 0 else 1), job


def step_inside(rank: int, size: int, jobs: list[Job]) -> list[Any]:
    """All backwards inside no_sync(), and what uses the gradients reduces them."""
    import torch
    from ranks_rig import data

    result = []
    for job in jobs:
        for use in ("norm", "grad", "step"):
            with tiermem.Runtime({"host_memory": "64MiB", "device": "cpu", **job.config}) as runtime:
                model = tiermem.shard(make_net(), runtime)
                optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
                with tiermem.no_sync(runtime), tiermem.no_sync(model):
                    for micro in range(2):
                        model(data(rank, micro, job)).square().mean().backward()
                assert model[0].weight.grad is not None
                if use == "norm":
                    optimizer.grad_norm()
                elif use == "grad":
                    tiermem.full_grad(model[0].weight)
                optimizer.step()
                result.append([tiermem.full_param(p).numpy() for p in model.parameters()])
                assert not torch.is_inference_mode_enabled()
    return result


def test_what_uses_the_gradients_reduces_them(tmp_path: Path) -> None:
    jobs = [Job(config, "fp32") for config in stages(tmp_path)[1:]]
    by_rank = run_ranks(step_inside, 2, jobs, timeout_s=100)
    for results in by_rank:
        for result in results:
            for value, expected in zip(result, by_rank[0][0], strict=True):
                assert np.array_equal(value, expected)


def test_no_sync_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    with tiermem.Runtime({"host_memory": "16MiB", "device": "cpu", "update": "backward"}) as runtime:
        model = tiermem.shard(make_net(), runtime)
        with pytest.raises(StateError, match=r"update: 'backward'.*'deferred'"), tiermem.no_sync(model):
            pass
        with pytest.raises(StateError, match=r"no parameter of this.*shard"):
            tiermem.no_sync(make_net()).__enter__()


@pytest.mark.parametrize("declared", [pytest.param(None, marks=pytest.mark.slow), MICRO])
def test_accumulation_in_the_parameters_precision(declared: int | None, tmp_path: Path) -> None:
    """Stages that reduce at the same times agree; a late reduction sends half of what fp32 takes."""
    common = {"gradient_accumulation_steps": declared}
    configs = [{**c, **common} for c in stages(tmp_path)]
    narrow = {"gradient_accumulation_dtype": "param"}
    jobs = [Job({**c, **narrow}, steps=2, micro_steps=MICRO, clip=0.05) for c in configs]
    wide = [Job(c, steps=2, micro_steps=MICRO, clip=0.05) for c in configs]
    for results in run_ranks(train_all, 2, [*jobs, *wide], timeout_s=200):
        fp32 = results[len(jobs) :]
        for index, (job, result) in enumerate(zip(jobs, results, strict=False)):
            late = declared is not None and job.config["stage"] < 2
            like = 0 if declared is None or late else 2
            assert_same(result, results[like], job)
            assert result.norms != fp32[index].norms  # the rounding is there, and small
            for (ours, _), (theirs, _) in zip(result.norms, fp32[index].norms, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-2)
            sent, full = (each.exchanged["GRADIENTS"][1] for each in (result, fp32[index]))
            if job.config["stage"] > 0:
                assert full == (2 * sent if late else sent)
