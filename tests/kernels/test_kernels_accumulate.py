"""Accumulation: exact conversions, and one order of the sum of squares for every variant."""

from __future__ import annotations

import struct

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiermem.kernels import Kernels, open_kernels
from tiermem.kernels.base import NORM_BLOCK_NUMEL, NORM_LANES

FP32, BF16, FP16 = FLOATS = torch.float32, torch.bfloat16, torch.float16
COMBINATIONS = [
    *((FP32, source, True) for source in FLOATS),
    *((destination, source, False) for destination in FLOATS for source in FLOATS),
]
LENGTHS = [0, 1, 15, 16, 17, 129, NORM_BLOCK_NUMEL - 1, NORM_BLOCK_NUMEL + 1, 5 * NORM_BLOCK_NUMEL + 37]


def canonical_sum(values: Tensor) -> float:
    """The definition, one addition at a time (over lanes and nothing else at once)."""
    total = 0.0
    array = values.double().numpy()
    for begin in range(0, array.size, NORM_BLOCK_NUMEL):
        block = array[begin : begin + NORM_BLOCK_NUMEL] ** 2
        lanes = numpy.zeros(NORM_LANES)
        for row in range(0, block.size, NORM_LANES):
            part = block[row : row + NORM_LANES]
            lanes[: part.size] += part
        width = NORM_LANES
        while width > 1:
            width //= 2
            lanes = lanes[:width] + lanes[width : 2 * width]
        total += float(lanes[0])
    return total


def random(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(numel, generator=generator) * 20 - 10
    return (torch.randn(numel, generator=generator) * 10**exponent).to(dtype)


def expected_result(destination: Tensor, source: Tensor, add: bool) -> Tensor:
    return destination + source.float() if add else source.to(destination.dtype)


@pytest.mark.parametrize(("to", "source_dtype", "add"), COMBINATIONS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_values_and_order(
    opened: dict[str, Kernels], numel: int, to: torch.dtype, source_dtype: torch.dtype, add: bool
) -> None:
    destination, source = random(numel, to, 1), random(numel, source_dtype, 2)
    expected = expected_result(destination, source, add)
    norm = canonical_sum(expected)
    for kernels in opened.values():
        result = destination.clone()
        assert struct.pack("d", kernels.accumulate(result, source, add=add)) == struct.pack(
            "d", norm
        ), kernels.name
        assert torch.equal(result, expected), kernels.name


def test_the_order_matters() -> None:
    """Were any other order as good, the tests above would show nothing."""
    values = random(NORM_BLOCK_NUMEL + 1000, FP32, 2)
    assert canonical_sum(values) != float((values.double() ** 2).sum())


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_do_not_matter(native: dict[str, Kernels], num_threads: int) -> None:
    source = random(9 * NORM_BLOCK_NUMEL + 5, BF16, 3)
    norm = canonical_sum(source)
    for name in native:
        with open_kernels(name, num_threads) as kernels:
            for _ in range(5):
                assert kernels.accumulate(torch.empty(source.numel()), source, add=False) == norm


@pytest.mark.parametrize("begin", [1, 3, 8])
def test_unaligned_start(opened: dict[str, Kernels], begin: int) -> None:
    """Blocks and lanes count from the start of what was passed, wherever that lies."""
    source, destination = random(1000, BF16, 3), random(1000, FP32, 4)
    expected = expected_result(destination, source, True)
    for kernels in opened.values():
        result = destination.clone()
        norm = kernels.accumulate(result[begin:-5], source[begin:-5], add=True)
        assert norm == canonical_sum(expected[begin:-5])
        assert torch.equal(result[:begin], destination[:begin])
        assert torch.equal(result[-5:], destination[-5:])


@settings(max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=70), st.sampled_from(FLOATS))
def test_any_values(opened: dict[str, Kernels], values: list[float], to: torch.dtype) -> None:
    """Round to nearest even, infinities and denormals included; the sum sees the rounded values."""
    source = torch.tensor(values, dtype=FP32)
    destination = torch.zeros(source.numel(), dtype=to)
    expected = source.to(destination.dtype)
    for kernels in opened.values():
        norm = kernels.accumulate(destination, source, add=False)
        assert torch.equal(destination, expected)
        assert norm == canonical_sum(expected)


def test_nan_and_infinity(opened: dict[str, Kernels]) -> None:
    """NaNs stay NaNs when rounded (no carry into the sign), always the same, and reach the norm."""
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], dtype=torch.int32).view(FP32).repeat(9)
    for kernels in opened.values():
        for numel in (36, 35, 3):
            for dtype, code in ((BF16, 0x7FC0), (FP16, 0x7E00)):
                result = torch.zeros(numel, dtype=dtype)
                assert numpy.isnan(kernels.accumulate(result, nans[:numel], add=False))
                assert result.view(torch.int16).tolist() == [code] * numel, kernels.name
        result = torch.ones(20)
        assert kernels.accumulate(result, torch.full((20,), float("inf")), add=True) == float("inf")


@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_in_place(opened: dict[str, Kernels], dtype: torch.dtype) -> None:
    values = random(70_003, dtype, 5)
    for kernels in opened.values():
        result = values.clone()
        assert kernels.accumulate(result, result, add=False) == canonical_sum(values)
        assert torch.equal(result, values)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sixteen_bits_are_copied_as_they_are(opened: dict[str, Kernels], dtype: torch.dtype) -> None:
    """NaNs with their payloads too, in vectors and in the tail."""
    codes = torch.arange(-(2**15), 2**15 - 3, dtype=torch.int32).to(torch.int16)
    for kernels in opened.values():
        result = torch.zeros(codes.numel(), dtype=dtype)
        assert numpy.isnan(kernels.accumulate(result, codes.view(dtype), add=False))
        assert torch.equal(result.view(torch.int16), codes), kernels.name
