"""Every update kernel on the same arrays, one after the other: what bench/adam.py reports as rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from arrays import huge_empty, seconds

from tiermem.kernels import AdamWStep, Kernels, Moments8bit, SGDStep
from tiermem.kernels.base import QUANT_BLOCK_NUMEL, num_quant_blocks

ADAM = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False}
REFERENCE = "adamw_fp32"

# Read and written per parameter: fp32 parameter 8, split master 8, fp32 moment 8, fp32 gradient 4,
# 16-bit gradient 2, moment in codes 2 and its share of a scale.
CODED_BYTES = 2 * (1 + 4 / QUANT_BLOCK_NUMEL)


class Row(NamedTuple):
    update: Callable[[], object]
    bytes_per_param: float
    torch_update: Callable[[], object] | None = None


class Arrays:
    """One parameter in fp32 and split, with all states; every kernel works on these."""

    def __init__(self, params: int) -> None:
        def floats() -> torch.Tensor:
            return huge_empty(params, torch.float32)

        self.param = torch.nn.Parameter(floats().normal_())
        self.param.grad = floats().normal_()
        self.exp_avg, self.exp_avg_sq, self.momentum = floats(), floats(), floats()
        self.hi = huge_empty(params, torch.bfloat16).copy_(self.param.detach())
        self.lo = huge_empty(params, torch.int16)
        self.half_grad = huge_empty(params, torch.bfloat16).copy_(self.param.grad)
        codes = [huge_empty(params, torch.uint8) for _ in range(2)]
        scales = [huge_empty(num_quant_blocks(params), torch.float32) for _ in range(2)]
        self.moments = Moments8bit(codes[0], scales[0], codes[1], scales[1])

    def torch_step(
        self, kind: type[torch.optim.Optimizer], options: dict[str, Any]
    ) -> Callable[[], Any]:
        optimizer = kind([self.param], fused=True, **options)
        optimizer.state[self.param] = (
            {"momentum_buffer": self.momentum}
            if kind is torch.optim.SGD
            else {
                "step": torch.tensor(2.0),
                "exp_avg": self.exp_avg,
                "exp_avg_sq": self.exp_avg_sq,
            }
        )
        return optimizer.step


def rows(arrays: Arrays, kernels: Kernels) -> dict[str, Row]:
    a = arrays
    adamw, adam = (
        AdamWStep(beta1=0.9, beta2=0.95, step=3, decoupled=decoupled, **ADAM)
        for decoupled in (True, False)
    )
    sgd = SGDStep(first=False, **SGD)
    param, grad = a.param.detach(), a.param.grad
    assert grad is not None
    averages = (a.exp_avg, a.exp_avg_sq)
    betas = ADAM | {"betas": (0.9, 0.95)}
    return {
        REFERENCE: Row(
            lambda: kernels.adamw_fp32(adamw, param, *averages, grad),
            28,
            a.torch_step(torch.optim.AdamW, betas),
        ),
        "adam_fp32": Row(
            lambda: kernels.adamw_fp32(adam, param, *averages, grad),
            28,
            a.torch_step(torch.optim.Adam, betas),
        ),
        "sgd_fp32": Row(
            lambda: kernels.sgd(sgd, param, None, a.momentum, grad),
            20,
            a.torch_step(torch.optim.SGD, SGD),
        ),
        "adamw_8bit_fp32": Row(
            lambda: kernels.adamw_8bit(adamw, param, None, a.moments, grad), 12 + 2 * CODED_BYTES
        ),
        "adamw_split": Row(lambda: kernels.adamw_split(adamw, a.hi, a.lo, *averages, a.half_grad), 26),
        "sgd_split": Row(lambda: kernels.sgd(sgd, a.hi, a.lo, a.momentum, a.half_grad), 18),
        "adamw_8bit_split": Row(
            lambda: kernels.adamw_8bit(adamw, a.hi, a.lo, a.moments, a.half_grad), 10 + 2 * CODED_BYTES
        ),
    }


def measure_updates(params: int, pairs: int, kernels: Kernels) -> dict[str, dict[str, Any]]:
    """Medians over the rounds, ratios taken within a round."""
    table = rows(Arrays(params), kernels)
    times: dict[str, list[float]] = {name: [] for name in table}
    torch_times: dict[str, list[float]] = {name: [] for name in table}
    for i in range(pairs + 1):
        # First torch's, then a pause: after each of its calls torch's threads spin for a while, and
        # would take the cores from what comes next.
        theirs = {n: seconds(row.torch_update) for n, row in table.items() if row.torch_update}
        time.sleep(0.1)
        ours = {name: seconds(row.update) for name, row in table.items()}
        if i > 0:  # the first is the warm-up
            for name in table:
                times[name].append(ours[name])
                torch_times[name].append(theirs.get(name, float("nan")))
    return {
        name: _figures(params, row, times[name], times[REFERENCE], torch_times[name])
        for name, row in table.items()
    }


def _figures(
    params: int, row: Row, times: list[float], reference: list[float], torch_times: list[float]
) -> dict[str, Any]:
    median = statistics.median(times)
    figures: dict[str, Any] = {
        "ns_per_param": round(median / params * 1e9, 3),
        "bytes_per_param": round(row.bytes_per_param, 2),
        "gb_per_s": round(row.bytes_per_param * params / median / 1e9, 2),
        "time_to_adamw_fp32": _spread([t / r for t, r in zip(times, reference, strict=True)]),
    }
    if row.torch_update is not None:
        speedups = [t / s for s, t in zip(times, torch_times, strict=True)]
        figures["ratio_to_torch_fused"] = _spread(speedups)
    return figures


def _spread(ratios: list[float]) -> list[float]:
    """Median, least and most."""
    return [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))]
