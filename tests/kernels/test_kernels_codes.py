"""8-bit codes: exact there and back, errors within the format, nothing bad hidden."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiermem.kernels import Kernels
from tiermem.kernels.base import QUANT_BLOCK_NUMEL, num_quant_blocks

SCALE_MIN = 2.0**-92
SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
TOP = {True: 0x7F, False: 0xFF}
BINADES = {True: 14, False: 30}  # from the first normal unit to the last


def quantize(kernels: Kernels, values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    codes = torch.full((values.numel(),), 77, dtype=torch.uint8)
    scales = torch.full((num_quant_blocks(values.numel()),), 77.0)
    kernels.quantize(values, codes, scales, signed=signed)
    return codes, scales


def dequantize(kernels: Kernels, codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    out = torch.full((codes.numel(),), 77.0)
    kernels.dequantize(codes, scales, out, signed=signed)
    return out


def unit(code: int) -> float:
    """The format, once more, in plain numbers: 3 bits of mantissa, subnormal below 8."""
    return float(code) if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 1)


def values_of(signed: bool) -> Tensor:
    """What every code stands for with the scale 1, in fp64."""
    units = [unit(code % 128 if signed else code) for code in range(256)]
    values = torch.tensor(units, dtype=torch.float64) / unit(TOP[signed])
    if signed:
        values[128:] *= -1
    return values


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


@SIGNS
@pytest.mark.parametrize("scale", [1.0, 1e-20, 3e38, 0.1, SCALE_MIN, 1.7 * SCALE_MIN])
def test_every_code_there_and_back(opened: dict[str, Kernels], signed: bool, scale: float) -> None:
    """One block holds every code; the values are those of the format."""
    codes, scales = torch.arange(256).to(torch.uint8), torch.tensor([scale])
    expected = values_of(signed) * scales.double()
    for kernels in opened.values():
        values = dequantize(kernels, codes, scales, signed)
        assert ((values - expected).abs() <= 2.0**-22 * expected.abs()).all(), kernels.name
        assert values[0] == 0.0
        assert values[TOP[signed]] == scales[0]
        back = quantize(kernels, values, signed)
        assert torch.equal(back[0], codes), kernels.name
        assert same(back[1], scales)


@SIGNS
@settings(max_examples=150)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20),
    exponent=st.integers(-149, 0),
    spread=st.booleans(),
)
def test_what_was_quantized_stays(
    opened: dict[str, Kernels], values: list[float], exponent: int, spread: bool, signed: bool
) -> None:
    """Any values, also where products would be denormal: a second quantization changes nothing."""
    start = torch.tensor(values, dtype=torch.float32) * 2.0**exponent
    if spread:
        start = start.repeat_interleave(150)  # over several blocks, the last one short
    start = start if signed else start.abs()
    first = None
    for kernels in opened.values():
        codes, scales = quantize(kernels, start, signed)
        again = quantize(kernels, dequantize(kernels, codes, scales, signed), signed)
        assert torch.equal(again[0], codes), kernels.name
        assert same(again[1], scales)
        first = first or (codes, scales)
        assert torch.equal(first[0], codes), kernels.name
        assert same(first[1], scales)


@SIGNS
def test_errors_are_those_of_the_format(opened: dict[str, Kernels], signed: bool) -> None:
    """Half a unit of the last bit: 2^-4 of the value where normal, else relative to the scale; the
    largest of each block exactly."""
    generator = torch.Generator().manual_seed(3)
    numel = 40 * QUANT_BLOCK_NUMEL
    values = torch.randn(numel, generator=generator) * 2 ** (
        -44 * torch.rand(numel, generator=generator)
    )
    values = values if signed else values.abs()
    blocks = values.view(-1, QUANT_BLOCK_NUMEL)
    scale = blocks.abs().amax(1, keepdim=True)
    smallest_normal = 8 / unit(TOP[signed]) * scale
    rounding = 1 + 2.0**-20
    bound = torch.maximum(blocks.abs() * 2.0**-4, smallest_normal * 2.0**-4) * rounding
    if not signed:  # what would round to zero becomes the smallest code
        bound = torch.where(blocks < smallest_normal / 16, smallest_normal / 8 * rounding, bound)
    assert float(smallest_normal[0] / scale[0]) < 2.0 ** -BINADES[signed]
    for kernels in opened.values():
        codes, scales = quantize(kernels, values, signed)
        result = dequantize(kernels, codes, scales, signed).view_as(blocks)
        assert torch.equal(scales, scale.flatten()), kernels.name
        assert ((result - blocks).abs() <= bound).all(), kernels.name
        largest = blocks.abs() == scale
        assert torch.equal(result[largest], blocks[largest])
        # The bound is not slack: it is nearly reached.
        normal = blocks.abs() > smallest_normal
        assert ((result - blocks).abs() / blocks.abs())[normal].max() > 0.9 * 2.0**-4


@SIGNS
def test_ties_go_to_even(opened: dict[str, Kernels], signed: bool) -> None:
    """In the middle of two neighbouring codes, with a scale for which every step is exact."""
    top = TOP[signed]
    scale = unit(top)
    middles = [(unit(code) + unit(code + 1)) / 2 for code in range(top)]
    expected = [code + code % 2 for code in range(top)] + [top]
    if not signed:
        expected[0] = 1  # the middle of 0 and 1 is positive
    values = torch.tensor([*middles, scale])
    for kernels in opened.values():
        codes, scales = quantize(kernels, values, signed)
        assert scales.item() == scale
        assert codes.tolist() == expected, kernels.name
        if signed:
            codes, _ = quantize(kernels, -values, signed)
            assert codes.tolist() == [code + 0x80 for code in expected], kernels.name


def test_a_positive_second_moment_stays_positive(opened: dict[str, Kernels]) -> None:
    values = torch.tensor([1.0, 1e-20, 1e-38, 1e-45, 0.0, -0.0])
    for kernels in opened.values():
        for scale in (1.0, 3e38, 1e-30, 1e-44):
            codes, scales = quantize(kernels, values.clone().mul_(scale), False)
            expected = [v * scale for v in values.double().tolist()]
            is_positive = [code > 0 for code in codes.tolist()]
            held = [float(torch.tensor(v, dtype=torch.float32)) > 0 for v in expected]
            assert is_positive == held, (kernels.name, scale)
            assert ((dequantize(kernels, codes, scales, False) > 0) == torch.tensor(held)).all()


@SIGNS
def test_zeros(opened: dict[str, Kernels], signed: bool) -> None:
    """A block of zeros has scale 0, and so has a signed one in which nothing would be left."""
    values = torch.zeros(3 * QUANT_BLOCK_NUMEL)
    values[0] = 1.0
    values[2 * QUANT_BLOCK_NUMEL] = 1e-45
    for kernels in opened.values():
        codes, scales = quantize(kernels, values, signed)
        assert scales.tolist() == [1.0, 0.0, 0.0 if signed else SCALE_MIN], kernels.name
        kept = [0] if signed else [0, 2 * QUANT_BLOCK_NUMEL]
        assert codes.nonzero().flatten().tolist() == kept
        if signed:
            minus, scales = quantize(kernels, torch.full((20,), -0.0), signed)
            assert minus.tolist() == [0x80] * 20
            assert same(dequantize(kernels, minus, scales, signed), torch.full((20,), -0.0))


@SIGNS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1e-45])
@pytest.mark.parametrize("at", [0, 7, 130, 255, 256, 300])
def test_nothing_bad_is_hidden(opened: dict[str, Kernels], at: int, bad: float, signed: bool) -> None:
    """The whole block is NaN afterwards, its neighbours are not; and stays so."""
    values = torch.ones(2 * QUANT_BLOCK_NUMEL + 50)
    values[at] = bad
    block = torch.arange(values.numel()) // QUANT_BLOCK_NUMEL == at // QUANT_BLOCK_NUMEL
    if signed and bad == -1e-45:  # an ordinary value there
        block[:] = False
    for kernels in opened.values():
        codes, scales = quantize(kernels, values, signed)
        result = dequantize(kernels, codes, scales, signed)
        assert torch.equal(result.isnan(), block), kernels.name
        assert not codes[block].any()
        again = quantize(kernels, result, signed)
        assert torch.equal(again[0], codes)
        assert same(again[1], scales)


@pytest.mark.parametrize("numel", [0, 1, 15, 17, 255, 256, 257, 2**16 + 3])
@SIGNS
def test_only_what_is_given_is_written(opened: dict[str, Kernels], numel: int, signed: bool) -> None:
    values = torch.rand(numel, generator=torch.Generator().manual_seed(1))
    expected = None
    for kernels in opened.values():
        codes = torch.full((numel + 64,), 77, dtype=torch.uint8)
        scales, out = torch.full((num_quant_blocks(numel) + 1,), 77.0), torch.full((numel + 9,), 77.0)
        kernels.quantize(values, codes[1 : numel + 1], scales[:-1], signed=signed)
        kernels.dequantize(codes[1 : numel + 1], scales[:-1], out[3 : numel + 3], signed=signed)
        assert codes[0] == 77
        assert (codes[numel + 1 :] == 77).all()
        assert scales[-1] == 77
        assert (out[:3] == 77).all()
        assert (out[numel + 3 :] == 77).all()
        expected = out if expected is None else expected
        assert torch.equal(out, expected), kernels.name
        assert numel == 0 or (out[3 : numel + 3] - values).abs().max() <= 2.0**-4


def test_wrong_tensors(opened: dict[str, Kernels]) -> None:
    values, codes, scales = torch.zeros(257), torch.zeros(257, dtype=torch.uint8), torch.zeros(2)
    for kernels in opened.values():
        with pytest.raises(ValueError, match=r"scale of codes is torch\.float32 \(1,\).*\(2,\)"):
            kernels.quantize(values, codes, scales[:1], signed=True)
        with pytest.raises(ValueError, match=r"codes is torch\.float32.*must be torch\.uint8 \(257,\)"):
            kernels.quantize(values, values, scales, signed=True)
        with pytest.raises(ValueError, match=r"values is torch\.float16"):
            kernels.quantize(values.half(), codes, scales, signed=True)
        with pytest.raises(ValueError, match=r"out is torch\.float64"):
            kernels.dequantize(codes, scales, values.double(), signed=True)
