"""A split master is an fp32 master: same update, exact round trip, NaN and infinity kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiermem.kernels import AdamWStep, Kernels

STEP = AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 2, grad_scale=0.5)
ONE_NAN = 0x7FC00000
EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00007FFF, 0x00008000,
    0x00008001, 0x80008000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF808000, 0xBFFF8000,
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000, 0x7F800000, 0xFF800000,
]  # fmt: skip
NANS = [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0xFFFF8000, 0x7FC00000, 0xFFC00000]


def from_bits(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def split(kernels: Kernels, master: Tensor) -> tuple[Tensor, Tensor]:
    hi = torch.empty(master.numel(), dtype=torch.bfloat16)
    lo = torch.empty(master.numel(), dtype=torch.int16)
    kernels.split_master(master, hi, lo)
    return hi, lo


def merge(kernels: Kernels, hi: Tensor, lo: Tensor) -> Tensor:
    out = torch.empty(hi.numel())
    kernels.merge_master(hi, lo, out)
    return out


def test_all_hi_with_selected_lo(opened: dict[str, Kernels]) -> None:
    """Every master within and at the ends of every rounding interval comes back, exact ties too."""
    hi = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for lo in (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234):
        master = (hi + lo).view(torch.float32)
        expected = torch.where(master.isnan(), ONE_NAN, master.view(torch.int32))
        for kernels in opened.values():
            pair = split(kernels, master)
            assert torch.equal(merge(kernels, *pair).view(torch.int32), expected), (kernels.name, lo)
            assert torch.equal(pair[0].isnan(), master.isnan())


def test_ties_go_away_from_zero(opened: dict[str, Kernels]) -> None:
    master = from_bits([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F807FFF, 0xBF807FFF])
    for kernels in opened.values():
        hi, lo = split(kernels, master)
        assert hi.view(torch.int16).bitwise_and(0xFF).tolist() == [0x81, 0x82, 0x81, 0x82, 0x80, 0x80]
        assert lo.tolist() == [-0x8000, -0x8000, -0x8000, -0x8000, 0x7FFF, 0x7FFF]


def test_hi_is_the_nearest_bf16(best: Kernels) -> None:
    """Away from ties it is what torch's conversion gives: the compute copy is no worse for it."""
    master = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    tie = master.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(split(best, master)[0][~tie], master.bfloat16()[~tie])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_any_bits(opened: dict[str, Kernels], bits: list[int]) -> None:
    master = from_bits(bits)
    expected = torch.where(master.isnan(), ONE_NAN, master.view(torch.int32))
    for kernels in opened.values():
        assert torch.equal(merge(kernels, *split(kernels, master)).view(torch.int32), expected)


@pytest.mark.parametrize("bits", NANS)
def test_nan_stays_nan(opened: dict[str, Kernels], bits: int) -> None:
    for kernels in opened.values():
        hi, lo = split(kernels, from_bits([bits] * 33))
        assert hi.view(torch.int16).tolist() == [0x7FC0] * 33, kernels.name
        assert lo.tolist() == [0] * 33


def test_nan_in_hi_is_nan_with_every_remainder(opened: dict[str, Kernels]) -> None:
    """A 16-bit parameter that became NaN elsewhere cannot be healed by its remainder."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    hi = codes[codes.isnan()]
    for kernels in opened.values():
        for lo in (-0x8000, -1, 0, 1, 0x7FFF):
            assert merge(kernels, hi, torch.full((hi.numel(),), lo, dtype=torch.int16)).isnan().all()


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_update_is_the_fp32_update(opened: dict[str, Kernels], grad_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    numel = 2**17 + 19
    master = torch.randn(numel, generator=generator)
    edges = from_bits(EDGES + NANS)
    master[: edges.numel()] = edges
    master[-edges.numel() :] = edges
    grad = torch.randn(numel, generator=generator).to(grad_dtype)
    moments = [torch.randn(numel, generator=generator), torch.rand(numel, generator=generator)]
    for kernels in opened.values():
        whole = [master.clone(), *(t.clone() for t in moments)]
        kernels.adamw_fp32(STEP, *whole, grad.float())
        halves = [*split(kernels, master), *(t.clone() for t in moments)]
        kernels.adamw_split(STEP, *halves, grad)
        expected = [*split(kernels, whole[0]), *whole[1:]]
        for name, mine, other in zip(
            ("hi", "lo", "exp_avg", "exp_avg_sq"), halves, expected, strict=True
        ):
            integer = torch.int32 if mine.dtype == torch.float32 else torch.int16
            assert torch.equal(mine.view(integer), other.view(integer)), (kernels.name, name)
        assert torch.equal(halves[0].isnan(), whole[0].isnan())


@pytest.mark.parametrize(
    ("where", "bits"),
    [
        *((where, bits) for where in ("exp_avg", "exp_avg_sq", "grad") for bits in NANS),
        ("grad", 0x7F800000),
        ("grad", 0xFF800000),
    ],
)
def test_a_bad_input_shows(opened: dict[str, Kernels], where: str, bits: int) -> None:
    """NaN anywhere, whatever its payload, and an infinite gradient end as NaN in the compute copy:
    on every element of a vector and in the tail."""
    for kernels in opened.values():
        hi, lo = split(kernels, torch.ones(37))
        inputs = {name: torch.zeros(37) for name in ("exp_avg", "exp_avg_sq", "grad")}
        inputs[where] = from_bits([bits] * 37)
        kernels.adamw_split(STEP, hi, lo, *inputs.values())
        assert hi.view(torch.int16).tolist() == [0x7FC0] * 37, kernels.name
        assert lo.tolist() == [0] * 37


def test_many_steps_keep_the_remainder(best: Kernels) -> None:
    """Steps far below the resolution of bf16 add up: the point of the remainder."""
    hi, lo = split(best, torch.ones(100))
    moments = [torch.zeros(100), torch.zeros(100)]
    for step in range(1, 201):
        best.adamw_split(AdamWStep(1e-5, 0.9, 0.95, 1e-8, 0.0, step), hi, lo, *moments, torch.ones(100))
    assert merge(best, hi, lo).sub(1 - 200 * 1e-5).abs().max() < 1e-5
