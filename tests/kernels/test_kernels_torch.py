"""The torch kernels give the native bits: they are the oracle, and what runs without a compiler."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiermem.kernels import AdamWStep, Kernels, SGDStep
from tiermem.kernels.torch_updates import fma

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded(exact: Fraction) -> float:
    """To fp32, nearest even, by integers alone."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    value = float(round(magnitude / unit) * unit) if exponent < 128 else math.inf
    return math.copysign(math.inf if value >= 2.0**128 else value, exact)


@settings(max_examples=300)
@given(finite, finite, finite)
# Double rounding: the exact sum lies just above, and just below, the middle of two fp32 values.
@example(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60)
@example(1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-60))
@example(1.0, 1 + 2.0**-23, 2.0**-24 + 2.0**-47)
@example(-(2.0**-80), 2.0**-60, 2.0**-149)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    expected = rounded(Fraction(a) * Fraction(b) + Fraction(c))
    result = fma(*(torch.tensor([x], dtype=torch.float32) for x in (a, b, c))).item()
    assert result == expected


def test_two_roundings_would_not_do() -> None:
    """What the emulation guards against does happen: the examples above are not for show."""
    a, c = 1 + 2.0**-12, 2.0**-60
    twice = (torch.tensor(a, dtype=torch.float64) ** 2 + c).float().item()
    assert twice != rounded(Fraction(a) ** 2 + Fraction(c))


def state(numel: int, grad_dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    wide = [
        torch.randn(numel, generator=generator)
        * 10 ** (torch.rand(numel, generator=generator) * 50 - 40)
        for _ in range(4)
    ]
    return [wide[0], wide[1], wide[2].abs(), wide[3].to(grad_dtype)]


@pytest.mark.parametrize("beta1", [0.9, 0.3])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.1, True), (0.1, False), (0.0, True)])
def test_fp32_is_native(
    native: dict[str, Kernels],
    opened: dict[str, Kernels],
    beta1: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    start = state(300_001, torch.float32)
    step = AdamWStep(1e-3, beta1, 0.95, 1e-8, weight_decay, 3, grad_scale=0.3, decoupled=decoupled)
    results = []
    for name in ("plain", "torch"):
        results.append([t.clone() for t in start])
        opened[name].adamw_fp32(step, *results[-1])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_split_is_native(
    native: dict[str, Kernels], opened: dict[str, Kernels], grad_dtype: torch.dtype
) -> None:
    master, *rest = state(300_001, grad_dtype)
    step = AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 3)
    results = []
    for name in ("plain", "torch"):
        hi, lo = torch.empty(300_001, dtype=torch.bfloat16), torch.empty(300_001, dtype=torch.int16)
        opened[name].split_master(master, hi, lo)
        results.append([hi, lo, *(t.clone() for t in rest)])
        opened[name].adamw_split(step, *results[-1])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.2, False), (0.9, 0.0, True)]
)
@pytest.mark.parametrize("form", ["fp32", "split", "bf16", "fp16"])
def test_sgd_is_native(
    native: dict[str, Kernels],
    opened: dict[str, Kernels],
    form: str,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first: bool,
) -> None:
    value, buffer, _, grad = state(30_001, torch.float32 if form == "fp32" else torch.bfloat16)
    step = SGDStep(1e-3, momentum, dampening, 0.1, nesterov, first, grad_scale=0.3)
    results = []
    for name in ("plain", "torch"):
        param, master = value.clone(), None
        if form == "split":
            param, master = value.bfloat16(), torch.empty(value.numel(), dtype=torch.int16)
            opened[name].split_master(value, param, master)
        elif form != "fp32":
            param, master = torch.empty(value.numel(), dtype=HALVES[form]), value.clone()
        used = None if momentum == 0.0 else buffer.clone()
        opened[name].sgd(step, param, master, used, grad)
        results.append([t for t in (param, master, used) if t is not None])
    for mine, other in zip(*results, strict=True):
        integer = torch.int32 if mine.dtype == torch.float32 else torch.int16
        assert torch.equal(mine.view(integer), other.view(integer))
