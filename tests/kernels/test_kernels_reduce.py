"""Reduction of several parts: one order of fp32 operations, one rounding, one order of the squares."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from torch import Tensor

from tiermem.kernels import Kernels, open_kernels
from tiermem.kernels.base import MAX_PARTS, NORM_BLOCK_NUMEL

FP32, BF16, FP16 = FLOATS = torch.float32, torch.bfloat16, torch.float16
NAN_BITS = {FP32: 0x7FC00000, BF16: 0x7FC0, FP16: 0x7E00}
COMBINATIONS = list(itertools.product(FLOATS, FLOATS, (False, True)))
LENGTHS = [0, 1, 15, 16, 33, 63, 64, 129, NORM_BLOCK_NUMEL + 1, 2 * NORM_BLOCK_NUMEL + 77]


def random(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """From denormals of fp16 to its infinity."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(numel, generator=generator) * 13 - 8
    return (torch.randn(numel, generator=generator) * 10**exponent).to(dtype)


def expected_result(destination: Tensor, parts: list[Tensor], scale: float, add: bool) -> Tensor:
    """numpy, in the order of the definition; it rounds to fp16 by itself, to bf16 torch does."""
    with numpy.errstate(over="ignore", invalid="ignore"):
        total = parts[0].float().numpy()
        for part in parts[1:]:
            total = total + part.float().numpy()
        total = total * numpy.float32(scale)
        if add:
            total = destination.float().numpy() + total
        half = torch.from_numpy(total.astype(numpy.float16))
    result = half if destination.dtype == FP16 else torch.from_numpy(total).to(destination.dtype)
    bits(result).masked_fill_(result.isnan(), NAN_BITS[result.dtype])
    return result


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == FP32 else torch.int16)


def same(left: Tensor, right: Tensor) -> bool:
    """Bit by bit, but for the payload of NaNs in fp32."""
    different = bits(left) != bits(right)
    return not (different & ~(left.isnan() & right.isnan() & (left.dtype == FP32))).any()


def check(opened: dict[str, Kernels], destination: Tensor, parts: list[Tensor], add: bool) -> None:
    scale = 1 / 3
    expected = expected_result(destination, parts, scale, add)
    norm = None
    for kernels in opened.values():
        result = destination.clone()
        copies = [result if part is destination else part for part in parts]
        squares = kernels.reduce(result, copies, scale, add=add)
        assert same(result, expected), kernels.name
        norm = kernels.accumulate(result, result, add=False) if norm is None else norm
        assert squares == norm or (numpy.isnan(squares) and numpy.isnan(norm)), kernels.name


@pytest.mark.parametrize(("to", "dtype", "add"), COMBINATIONS)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_combinations(
    opened: dict[str, Kernels], to: torch.dtype, dtype: torch.dtype, add: bool, count: int
) -> None:
    numel = NORM_BLOCK_NUMEL + 117
    parts = [random(numel, dtype, seed) for seed in range(count)]
    check(opened, random(numel, to, 99), parts, add)


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize(("to", "dtype", "add"), [(FP32, BF16, True), (BF16, FP16, False)])
def test_lengths(
    opened: dict[str, Kernels], numel: int, to: torch.dtype, dtype: torch.dtype, add: bool
) -> None:
    check(opened, random(numel, to, 9), [random(numel, dtype, seed) for seed in range(4)], add)


@pytest.mark.parametrize("dtype", FLOATS)
def test_most_parts(opened: dict[str, Kernels], dtype: torch.dtype) -> None:
    parts = [random(3001, dtype, seed) for seed in range(MAX_PARTS)]
    check(opened, random(3001, FP32, 99), parts, False)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("add", [False, True])
def test_in_place(opened: dict[str, Kernels], dtype: torch.dtype, place: int, add: bool) -> None:
    """Whatever its place in the order, the destination is read before it is written; even twice."""
    numel = NORM_BLOCK_NUMEL + 1017
    destination = random(numel, dtype, 1)
    parts = [random(numel, dtype, 2), random(numel, dtype, 3)]
    parts.insert(place, destination)
    check(opened, destination, parts, add)


def test_the_order_of_parts_matters(best: Kernels) -> None:
    """Were any other order as good, the tests above would show nothing."""
    parts = [random(1000, FP32, seed) for seed in range(4)]
    results = [torch.empty(1000), torch.empty(1000)]
    best.reduce(results[0], parts, 1.0, add=False)
    best.reduce(results[1], parts[::-1], 1.0, add=False)
    assert not torch.equal(*results)


@pytest.mark.parametrize(("to", "dtype"), list(itertools.product(FLOATS, FLOATS)))
def test_slices_and_starts(opened: dict[str, Kernels], to: torch.dtype, dtype: torch.dtype) -> None:
    """Cut anywhere, the values are the same; nothing outside of a slice is touched."""
    numel = NORM_BLOCK_NUMEL + 300
    start, parts = random(numel, to, 1), [random(numel, dtype, seed) for seed in range(2, 5)]
    expected = start.clone()
    expected[1:-2] = expected_result(start, parts, 0.7, True)[1:-2]
    cuts = [1, 4, 11, 26, 43, 170, NORM_BLOCK_NUMEL - 3, numel - 2]
    for kernels in opened.values():
        result = start.clone()
        for begin, end in itertools.pairwise(cuts):
            kernels.reduce(result[begin:end], [p[begin:end] for p in parts], 0.7, add=True)
        assert same(result, expected), kernels.name


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_do_not_matter(native: dict[str, Kernels], num_threads: int) -> None:
    numel = 9 * NORM_BLOCK_NUMEL + 5
    parts = [random(numel, BF16, seed) for seed in range(3)]
    results = []
    for name in native:
        with open_kernels(name, num_threads) as kernels:
            results += [kernels.reduce(torch.empty(numel), parts, 0.5, add=False) for _ in range(5)]
    with open_kernels("torch") as oracle:
        results.append(oracle.reduce(torch.empty(numel), parts, 0.5, add=False))
    assert len(set(results)) == 1


def test_every_fp16_value(opened: dict[str, Kernels]) -> None:
    """Widened exactly and rounded back to itself, by whole vectors and by the tail; NaN to one NaN."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = codes.view(FP16)
    numbers = ~values.isnan()
    for kernels in opened.values():
        for step in (2**16,) if kernels.name == "torch" else (2**16, 13):
            wide, back = torch.empty(2**16), torch.empty(2**16, dtype=FP16)
            for begin in range(0, 2**16, step):
                part = slice(begin, begin + step)
                kernels.reduce(wide[part], [values[part]], 1.0, add=False)
                kernels.reduce(back[part], [wide[part]], 1.0, add=False)
            assert torch.equal(bits(wide)[numbers], bits(values.float())[numbers]), kernels.name
            assert wide[~numbers].isnan().all()
            assert torch.equal(bits(back)[numbers], codes[numbers]), kernels.name
            assert (bits(back)[~numbers] == 0x7E00).all(), kernels.name


@pytest.mark.parametrize("to", [BF16, FP16])
def test_ties_and_their_neighbours(opened: dict[str, Kernels], to: torch.dtype) -> None:
    """All midpoints of neighbouring 16-bit values and the fp32 values beside them, to the overflow."""
    values = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(to).double()
    values = values[values.isfinite()]
    middle = torch.cat(
        [(values[1:] + values[:-1]) / 2, values[-1:] * 2 - (values[-1] + values[-2]) / 2]
    )
    near = bits(middle.float())[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
    source = near.clamp(min=0).flatten().view(FP32)
    source = torch.cat([source, -source])
    expected = source.to(to)
    for kernels in opened.values():
        result = torch.empty(source.numel(), dtype=to)
        kernels.reduce(result, [source], 1.0, add=False)
        assert same(result, expected), kernels.name
        for begin in range(0, 600, 15):  # tails only
            kernels.reduce(result[begin : begin + 15], [source[begin : begin + 15]], 1.0, add=False)
        assert same(result, expected), kernels.name


def test_infinity_minus_infinity(opened: dict[str, Kernels]) -> None:
    infinity = torch.full((37,), float("inf"))
    for kernels in opened.values():
        for to, code in ((BF16, 0x7FC0), (FP16, 0x7E00)):
            result = torch.zeros(37, dtype=to)
            assert numpy.isnan(kernels.reduce(result, [infinity, -infinity], 1.0, add=False))
            assert bits(result).tolist() == [code] * 37, kernels.name
        overflow = torch.zeros(37, dtype=FP16)
        big = torch.full((37,), 40000.0).half()
        assert kernels.reduce(overflow, [big, big], 1.0, add=False) == float("inf")
        assert kernels.reduce(overflow, [big, big], 0.5, add=False) == 37 * float(big[0]) ** 2
