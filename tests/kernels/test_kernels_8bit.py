"""AdamW with moments in 8-bit codes is the update with fp32 moments, between two conversions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tiermem.kernels import AdamWStep, Kernels, Moments8bit, open_kernels
from tiermem.kernels.base import QUANT_BLOCK_NUMEL, num_quant_blocks

STEPS = [
    AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 3, grad_scale=0.37),
    AdamWStep(1e-2, 0.4, 0.999, 1e-8, 0.1, 2, grad_scale=-1.0, decoupled=False),
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FORMS = [
    ("fp32", FP32),
    *(("split", grad) for grad in (FP32, BF16)),
    *((form, grad) for form in ("bf16", "fp16") for grad in (FP32, BF16, FP16)),
]
HALVES = {"bf16": BF16, "fp16": FP16}


def empty_moments(numel: int) -> Moments8bit:
    codes = [torch.zeros(numel, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(num_quant_blocks(numel)) for _ in range(2)]
    return Moments8bit(codes[0], scales[0], codes[1], scales[1])


def tensors(moments: Moments8bit) -> list[Tensor]:
    return [
        *(moments.exp_avg, moments.exp_avg_scale),
        *(moments.exp_avg_sq, moments.exp_avg_sq_scale),
    ]


def copy(moments: Moments8bit) -> Moments8bit:
    return Moments8bit(*(t.clone() for t in tensors(moments)))


def part(moments: Moments8bit, begin: int, end: int) -> Moments8bit:
    """A slice from one block bound to another, or to the end."""
    blocks = slice(begin // QUANT_BLOCK_NUMEL, num_quant_blocks(end))
    codes = slice(begin, end)
    return Moments8bit(
        *(moments.exp_avg[codes], moments.exp_avg_scale[blocks]),
        *(moments.exp_avg_sq[codes], moments.exp_avg_sq_scale[blocks]),
    )


class State:
    """A parameter in one form with its gradient and moments, all random."""

    def __init__(self, kernels: Kernels, numel: int, form: str, grad_dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(numel)

        def wide() -> Tensor:
            exponent = torch.rand(numel, generator=generator) * 12 - 8
            return torch.randn(numel, generator=generator) * 10**exponent

        self.param, self.master = torch.randn(numel, generator=generator), None
        if form == "split":
            value, self.master = self.param, torch.empty(numel, dtype=torch.int16)
            self.param = torch.empty(numel, dtype=BF16)
            kernels.split_master(value, self.param, self.master)
        elif form != "fp32":
            self.param, self.master = self.param.to(HALVES[form]), self.param
        self.grad = wide().to(grad_dtype)
        self.moments = empty_moments(numel)
        m = self.moments
        kernels.quantize(wide(), m.exp_avg, m.exp_avg_scale, signed=True)
        kernels.quantize(wide().square(), m.exp_avg_sq, m.exp_avg_sq_scale, signed=False)

    def clone(self) -> State:
        other = State.__new__(State)
        other.param, other.grad, other.moments = self.param.clone(), self.grad, copy(self.moments)
        other.master = None if self.master is None else self.master.clone()
        return other

    def update(self, kernels: Kernels, step: AdamWStep, begin: int = 0, end: int | None = None) -> None:
        cut = slice(begin, self.param.numel() if end is None else end)
        master = None if self.master is None else self.master[cut]
        moments = part(self.moments, cut.start, cut.stop)
        kernels.adamw_8bit(step, self.param[cut], master, moments, self.grad[cut])

    def bits(self) -> list[Tensor]:
        weights = [self.param] if self.master is None else [self.param, self.master]
        integers = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
        return [t.view(integers[t.itemsize]) for t in (*weights, *tensors(self.moments))]

    def same(self, other: State) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.bits(), other.bits(), strict=True))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("form", "grad_dtype"), FORMS)
def test_it_is_the_update_with_fp32_moments(
    opened: dict[str, Kernels], form: str, grad_dtype: torch.dtype, step: AdamWStep
) -> None:
    """Dequantized, updated, quantized by the other kernels: the same parameter and moments."""
    for kernels in opened.values():
        state = State(kernels, 5_003, form, grad_dtype)
        expected = state.clone()
        m, moments = expected.moments, [torch.empty(5_003) for _ in range(2)]
        kernels.dequantize(m.exp_avg, m.exp_avg_scale, moments[0], signed=True)
        kernels.dequantize(m.exp_avg_sq, m.exp_avg_sq_scale, moments[1], signed=False)
        if form == "fp32":
            kernels.adamw_fp32(step, expected.param, *moments, state.grad)
        elif form == "split":
            assert expected.master is not None
            kernels.adamw_split(step, expected.param, expected.master, *moments, state.grad)
        else:
            assert expected.master is not None
            kernels.adamw_master(step, expected.param, expected.master, *moments, state.grad)
        kernels.quantize(moments[0], m.exp_avg, m.exp_avg_scale, signed=True)
        kernels.quantize(moments[1], m.exp_avg_sq, m.exp_avg_sq_scale, signed=False)
        before = state.clone()
        state.update(kernels, step)
        assert state.same(expected), kernels.name
        assert not state.same(before)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("form", "grad_dtype"), FORMS)
@pytest.mark.parametrize("numel", [0, 1, 17, 255, 256, 257, 3 * 2**16 + 77])
def test_variants_and_slices(
    native: dict[str, Kernels], numel: int, form: str, grad_dtype: torch.dtype, step: AdamWStep
) -> None:
    """The same bits from every variant, whole or cut at blocks."""
    start = State(native["plain"], numel, form, grad_dtype)
    expected = start.clone()
    expected.update(native["plain"], step)
    cuts = [k * QUANT_BLOCK_NUMEL for k in (0, 1, 3, 256, 257, 600) if k * QUANT_BLOCK_NUMEL < numel]
    for kernels in native.values():
        whole, sliced = start.clone(), start.clone()
        whole.update(kernels, step)
        for begin, end in itertools.pairwise([*cuts, numel]):
            sliced.update(kernels, step, begin, end)
        assert whole.same(expected), kernels.name
        assert sliced.same(expected), kernels.name


@pytest.mark.parametrize("form", ["fp32", "split", "fp16"])
def test_torch_is_native(native: dict[str, Kernels], opened: dict[str, Kernels], form: str) -> None:
    start = State(native["plain"], 2**16 + 300, form, FP32)
    for step in STEPS:
        results = [start.clone() for _ in range(2)]
        for result, name in zip(results, ("plain", "torch"), strict=True):
            result.update(opened[name], step)
        assert results[0].same(results[1])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_do_not_matter(native: dict[str, Kernels], num_threads: int) -> None:
    start = State(native["plain"], 5 * 2**16 + 5, "split", BF16)
    expected = start.clone()
    expected.update(native["plain"], STEPS[0])
    for name in native:
        with open_kernels(name, num_threads) as kernels:
            result = start.clone()
            result.update(kernels, STEPS[0])
            assert result.same(expected), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_shows(opened: dict[str, Kernels], bad: float) -> None:
    """In its own parameter at once, in its block with the next update; nowhere else."""
    for kernels in opened.values():
        param, grad, moments = torch.ones(700), torch.ones(700), empty_moments(700)
        grad[300] = bad
        kernels.adamw_8bit(STEPS[0], param, None, moments, grad)
        assert param.isnan().nonzero().flatten().tolist() == [300], kernels.name
        assert moments.exp_avg_scale.isnan().tolist() == [False, True, False]
        assert moments.exp_avg_sq_scale.isnan().tolist() == [False, True, False]
        kernels.adamw_8bit(STEPS[0], param, None, moments, torch.ones(700))
        assert param.isnan().nonzero().flatten().tolist() == list(range(256, 512)), kernels.name


def test_it_follows_the_update_in_fp32(best: Kernels) -> None:
    """Many steps to a minimum: the errors of the codes do not add up. With the moments lost in each
    step they would: that is the control."""
    target = torch.randn(3_000, generator=torch.Generator().manual_seed(0))
    exact, coded, lost = [torch.zeros(3_000) for _ in range(3)], torch.zeros(3_000), torch.zeros(3_000)
    moments = empty_moments(3_000)
    for count in range(1, 401):
        step = AdamWStep(0.1 * (1 - count / 401), 0.9, 0.99, 1e-8, 0.0, count)
        best.adamw_fp32(step, *exact, exact[0] - target)
        best.adamw_8bit(step, coded, None, moments, coded - target)
        best.adamw_8bit(step, lost, None, empty_moments(3_000), lost - target)
    errors = [float((param - target).square().mean()) for param in (exact[0], coded, lost)]
    assert errors[1] < 4 * errors[0]
    assert errors[2] > 1000 * errors[0]


def test_wrong_tensors(opened: dict[str, Kernels]) -> None:
    good = torch.zeros(257)
    names = ("exp_avg", "scale of exp_avg", "exp_avg_sq", "scale of exp_avg_sq")
    for kernels in opened.values():
        for i, name in enumerate(names):
            fields = tensors(empty_moments(257))
            fields[i] = fields[i][:-1]
            with pytest.raises(ValueError, match=rf"^{name} is torch.*must be"):
                kernels.adamw_8bit(STEPS[0], good, None, Moments8bit(*fields), good)
            fields[i] = torch.zeros(257 if i % 2 == 0 else 2, dtype=torch.int32)
            with pytest.raises(ValueError, match=rf"^{name} is torch\.int32"):
                kernels.adamw_8bit(STEPS[0], good, None, Moments8bit(*fields), good)
        with pytest.raises(ValueError, match=r"param is torch\.float16"):
            kernels.adamw_8bit(STEPS[0], good.half(), None, empty_moments(257), good)


def test_core_refuses_what_is_missing() -> None:
    native = pytest.importorskip("tiermem._native")
    ffi, lib = native.ffi, native.lib
    data = ffi.new("float[16]")
    weights = ffi.new("tm_weights *", {"param": data, "grad": data})
    fields = {
        "exp_avg": ffi.new("uint8_t[16]"),
        "exp_avg_scale": data,
        "exp_avg_sq": ffi.new("uint8_t[16]"),
        "exp_avg_sq_scale": data,
    }

    def result(isa: int = 0, decay_kind: int = 0, **changes: object) -> int:
        hyper = ffi.new("tm_adamw *", {"decay_kind": decay_kind})
        moments = ffi.new("tm_moments_8bit *", fields | changes)
        return int(lib.tm_adamw_8bit_update(ffi.NULL, isa, hyper, 16, weights, moments))

    assert result() == 0
    assert result(isa=99) == result(decay_kind=3) == -22
    assert all(result(**{name: ffi.NULL}) == -22 for name in fields)
    codes, null = fields["exp_avg"], ffi.NULL
    for isa, numel in ((99, 0), (0, 1)):
        assert lib.tm_quantize(null, isa, numel, 1, null, null, null) == -22
        assert lib.tm_dequantize(null, isa, numel, 1, null, null, null) == -22
    assert lib.tm_quantize(null, 0, 16, 1, data, codes, null) == -22
    assert lib.TM_QUANT_BLOCK == QUANT_BLOCK_NUMEL
