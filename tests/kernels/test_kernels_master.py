"""An fp32 master with a 16-bit copy: the fp32 update, and the copy is its nearest value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiermem.kernels import AdamWStep, Kernels

STEP = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 2, grad_scale=2.0**-5)
HALVES = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
GRADS = [torch.float32, torch.bfloat16, torch.float16]


def state(numel: int, grad_dtype: torch.dtype) -> list[Tensor]:
    """Master, moments, gradient; masters from below the denormals of fp16 to beyond its largest."""
    generator = torch.Generator().manual_seed(7)

    def wide(low: float, high: float) -> Tensor:
        exponent = torch.rand(numel, generator=generator) * (high - low) + low
        return torch.randn(numel, generator=generator) * 10**exponent

    return [wide(-9, 6), wide(-9, 1), wide(-12, 1).abs(), wide(-7, 3).to(grad_dtype)]


@pytest.mark.parametrize("grad_dtype", GRADS)
@pytest.mark.parametrize("dtype", HALVES)
def test_it_is_the_fp32_update_rounded(
    opened: dict[str, Kernels], dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    *start, grad = state(2**17 + 19, grad_dtype)
    first = None
    for kernels in opened.values():
        expected = [t.clone() for t in start]
        kernels.adamw_fp32(STEP, *expected, grad.float())
        result = [t.clone() for t in start]
        param = torch.full((grad.numel(),), float("nan"), dtype=dtype)
        kernels.adamw_master(STEP, param, *result, grad)
        for mine, other in zip(result, expected, strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32)), kernels.name
        rounded = expected[0].to(dtype)
        assert torch.equal(param.view(torch.int16), rounded.view(torch.int16)), kernels.name
        first = param if first is None else first
        assert torch.equal(param.view(torch.int16), first.view(torch.int16)), kernels.name
    assert dtype == torch.bfloat16 or rounded.isinf().any()  # the state is as wide as it says


@pytest.mark.parametrize("dtype", HALVES)
def test_ties_go_to_even(opened: dict[str, Kernels], dtype: torch.dtype) -> None:
    """Not away from zero, as in a split master; an update of zero leaves the master as it is."""
    unit = torch.finfo(dtype).eps
    master = torch.tensor([1 + unit / 2, 1 + unit * 1.5, -1 - unit / 2, -1 - unit * 1.5]).repeat(9)
    expected = torch.tensor([1, 1 + 2 * unit, -1, -1 - 2 * unit], dtype=dtype).repeat(9)
    step = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.0, 1)
    for kernels in opened.values():
        result, param = master.clone(), torch.zeros(36, dtype=dtype)
        kernels.adamw_master(step, param, result, torch.zeros(36), torch.zeros(36), torch.zeros(36))
        assert torch.equal(result, master)
        assert torch.equal(param, expected), kernels.name


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_shows(opened: dict[str, Kernels], dtype: torch.dtype, bad: float) -> None:
    """As NaN in the master and as the one NaN in the copy, in vectors and in the tail."""
    for kernels in opened.values():
        for grad_dtype in GRADS:
            master, param = torch.ones(37), torch.zeros(37, dtype=dtype)
            grad = torch.full((37,), bad, dtype=grad_dtype)
            kernels.adamw_master(STEP, param, master, torch.zeros(37), torch.zeros(37), grad)
            assert master.isnan().all()
            assert param.view(torch.int16).tolist() == [HALVES[dtype]] * 37, kernels.name


def test_small_steps_reach_the_copy(best: Kernels) -> None:
    """Steps far below the resolution of the copy add up in the master: the point of having one."""
    master, param = torch.ones(100), torch.ones(100).half()
    moments = [torch.zeros(100), torch.zeros(100)]
    for count in range(1, 201):
        step = AdamWStep(1e-5, 0.9, 0.95, 1e-8, 0.0, count)
        best.adamw_master(step, param, master, *moments, torch.ones(100).half())
    assert master.sub(1 - 200 * 1e-5).abs().max() < 1e-5
    assert torch.equal(param, master.half())


def test_wrong_tensors(opened: dict[str, Kernels]) -> None:
    good, half = torch.zeros(8), torch.zeros(8).half()
    for kernels in opened.values():
        with pytest.raises(ValueError, match=r"param is torch\.float32"):
            kernels.adamw_master(STEP, good, good, good, good, good)
        with pytest.raises(ValueError, match=r"master is torch\.float16"):
            kernels.adamw_master(STEP, half, half, good, good, good)
        with pytest.raises(ValueError, match=r"grad is torch\.float64"):
            kernels.adamw_master(STEP, half, good, good, good, good.double())
        with pytest.raises(ValueError, match=r"exp_avg_sq is .*must be .*\(8,\)"):
            kernels.adamw_master(STEP, half, good, good, torch.zeros(9), good)
