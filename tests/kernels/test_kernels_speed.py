"""Benchmarks of the kernels (pytest-benchmark); no test on absolute time. See bench/adam.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiermem.kernels import AdamWStep, Kernels

NUMEL = 2**20
STEP = AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 3)


@pytest.mark.benchmark(group="adamw_split, 1 Mi elements")
@pytest.mark.parametrize("name", ["avx512", "avx2", "plain", "torch"])
def test_adamw_split(benchmark: Any, opened: dict[str, Kernels], name: str) -> None:
    if name not in opened:
        pytest.skip(f"no {name} kernels here")
    hi, lo = torch.ones(NUMEL, dtype=torch.bfloat16), torch.zeros(NUMEL, dtype=torch.int16)
    moments = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
    grad = torch.randn(NUMEL).bfloat16()
    arguments = (STEP, hi, lo, *moments, grad)
    benchmark.pedantic(opened[name].adamw_split, args=arguments, rounds=3, warmup_rounds=1)
    assert moments[1].any()


@pytest.mark.benchmark(group="adamw_master with an fp16 copy, 1 Mi elements")
@pytest.mark.parametrize("name", ["avx512", "avx2", "plain", "torch"])
def test_adamw_master(benchmark: Any, opened: dict[str, Kernels], name: str) -> None:
    if name not in opened:
        pytest.skip(f"no {name} kernels here")
    param, master = torch.zeros(NUMEL).half(), torch.ones(NUMEL)
    moments = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
    arguments = (STEP, param, master, *moments, torch.randn(NUMEL).half())
    benchmark.pedantic(opened[name].adamw_master, args=arguments, rounds=3, warmup_rounds=1)
    assert torch.equal(param, master.half())


@pytest.mark.benchmark(group="accumulate, 1 Mi elements")
@pytest.mark.parametrize("name", ["avx512", "avx2", "plain", "torch"])
def test_accumulate(benchmark: Any, opened: dict[str, Kernels], name: str) -> None:
    if name not in opened:
        pytest.skip(f"no {name} kernels here")
    total, grad = torch.zeros(NUMEL), torch.ones(NUMEL).bfloat16()
    norm = benchmark.pedantic(
        opened[name].accumulate, args=(total, grad), kwargs={"add": True}, rounds=3, warmup_rounds=1
    )
    assert norm == NUMEL * float(total[0]) ** 2


PARTS = [torch.full((NUMEL,), float(k)).bfloat16() for k in range(4)]


def torch_reduce(total: Tensor) -> Tensor:
    """What torch offers: operation after operation, the norm a pass of its own."""
    torch.add(PARTS[0].float(), PARTS[1], out=total)
    total.add_(PARTS[2]).add_(PARTS[3]).mul_(0.25)
    return torch.linalg.vector_norm(total, dtype=torch.float64)


@pytest.mark.benchmark(group="reduce of 4 bf16 parts into fp32, 1 Mi elements")
@pytest.mark.parametrize("name", ["avx512", "avx2", "plain", "torch", "operations of torch"])
def test_reduce(benchmark: Any, opened: dict[str, Kernels], name: str) -> None:
    total = torch.zeros(NUMEL)
    if name == "operations of torch":
        norm = benchmark.pedantic(torch_reduce, args=(total,), rounds=3, warmup_rounds=1).square()
    elif name in opened:
        arguments, keywords = (total, PARTS, 0.25), {"add": False}
        norm = benchmark.pedantic(
            opened[name].reduce, args=arguments, kwargs=keywords, rounds=3, warmup_rounds=1
        )
    else:
        pytest.skip(f"no {name} kernels here")
    assert torch.equal(total, torch.full((NUMEL,), 1.5))
    assert float(norm) == pytest.approx(NUMEL * 1.5**2)
