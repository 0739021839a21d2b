"""Wrong tensors, names and numbers are refused with the value and the limit; nothing is touched."""

from __future__ import annotations

import itertools

import pytest
import torch

from tiermem.errors import ConfigError, StateError
from tiermem.kernels import AdamWStep, Kernels, SGDStep, available_kernels, open_kernels
from tiermem.kernels.base import MAX_PARTS

STEP = AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 1)


def test_wrong_tensors(opened: dict[str, Kernels]) -> None:
    good = torch.zeros(8)
    for bad in (torch.zeros(9), torch.zeros(8).double(), torch.zeros(16)[::2], torch.zeros(2, 4)):
        for kernels in opened.values():
            with pytest.raises(ValueError, match=r"exp_avg is torch\.float.*must be .*\(8,\)"):
                kernels.adamw_fp32(STEP, good, bad, good, good)
            with pytest.raises(ValueError, match=r"out is|hi is"):
                kernels.merge_master(torch.zeros(8).bfloat16(), torch.zeros(8, dtype=torch.int16), bad)


def test_bf16_gradient_needs_a_split_master(opened: dict[str, Kernels]) -> None:
    for kernels in opened.values():
        with pytest.raises(ValueError, match=r"grad is torch\.bfloat16"):
            kernels.adamw_fp32(STEP, *(torch.zeros(8) for _ in range(3)), torch.zeros(8).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accumulating_into_16_bits_is_refused(opened: dict[str, Kernels], dtype: torch.dtype) -> None:
    for kernels in opened.values():
        with pytest.raises(ValueError, match=f"destination is {dtype}.*must be torch.float32"):
            kernels.accumulate(torch.zeros(8, dtype=dtype), torch.zeros(8), add=True)
        with pytest.raises(ValueError, match=r"source is torch\.float64"):
            kernels.accumulate(torch.zeros(8), torch.zeros(8).double(), add=True)


def test_wrong_parts(opened: dict[str, Kernels]) -> None:
    good, half = torch.zeros(8), torch.zeros(8).half()
    for kernels in opened.values():
        for count in (0, MAX_PARTS + 1):
            with pytest.raises(ValueError, match=f"{count} parts, must be 1 to {MAX_PARTS}"):
                kernels.reduce(good, [good] * count, 1.0, add=False)
        with pytest.raises(ValueError, match=r"parts\[1\] is torch\.float16.*must be torch\.float32"):
            kernels.reduce(torch.zeros(8), [good, half], 1.0, add=False)
        with pytest.raises(ValueError, match=r"parts\[0\] is torch\.int32"):
            kernels.reduce(torch.zeros(8), [good.int()], 1.0, add=False)
        for bad in (torch.zeros(9), torch.zeros(16)[::2], torch.zeros(2, 4)):
            with pytest.raises(ValueError, match=r"parts\[0\] is .*must be .*\(8,\)"):
                kernels.reduce(torch.zeros(8), [bad], 1.0, add=False)


def test_parts_that_overlap_the_destination(opened: dict[str, Kernels]) -> None:
    memory = torch.zeros(100)
    wrong = [memory[1:21], memory[19:39], memory.view(torch.bfloat16)[20:40]]
    for kernels in opened.values():
        for part in wrong:
            with pytest.raises(ValueError, match=r"parts\[1\] .* overlaps destination"):
                like = torch.zeros(20, dtype=part.dtype)
                kernels.reduce(memory[10:30], [like, part], 1.0, add=False)
        kernels.reduce(memory[20:40], [memory[:20], memory[40:60]], 1.0, add=False)


def test_core_refuses_wrong_reductions() -> None:
    native = pytest.importorskip("tiermem._native")
    ffi, lib = native.ffi, native.lib
    data = ffi.new("float[16]")
    parts = ffi.new("const void *[]", [data] * 2)
    good = {"destination": data, "parts": parts, "num_parts": 2, "scale": 1.0}

    def result(numel: int = 8, **changes: object) -> int:
        reduction = ffi.new("tm_reduction *", good | changes)
        return int(lib.tm_reduce(ffi.NULL, lib.TM_ISA_PLAIN, numel, reduction, ffi.NULL))

    assert result() == 0
    assert result(0, destination=ffi.NULL) == 0
    assert result(destination_dtype=7) == result(part_dtype=3) == result(destination=ffi.NULL) == -22
    assert result(num_parts=0) == result(num_parts=lib.TM_MAX_PARTS + 1) == -22
    assert result(parts=ffi.NULL) == result(parts=ffi.new("const void *[]", [data, ffi.NULL])) == -22
    assert lib.tm_reduce(ffi.NULL, 99, 8, ffi.new("tm_reduction *", good), ffi.NULL) == -22
    assert lib.TM_MAX_PARTS == MAX_PARTS


def test_core_applies_decay_only_where_told() -> None:
    native = pytest.importorskip("tiermem._native")
    ffi, lib = native.ffi, native.lib
    kinds = {lib.TM_DECAY_NONE: 2.0, lib.TM_DECAY_DECOUPLED: 1.0, lib.TM_DECAY_L2: 1.0}
    for isa in range(lib.tm_isa_best() + 1):
        for kind, expected in kinds.items():
            # L2: the gradient becomes 0.5 * 2, the moments 1, the update 2 * 1 / (1 + 1).
            hyper = ffi.new("tm_adamw *", {"decay": 0.5, "decay_kind": kind, "eps": 1.0})
            hyper.bias_correction2_sqrt = hyper.one_minus_beta2 = hyper.one_minus_beta1 = 1.0
            hyper.step_size, hyper.grad_scale = 2.0, 1.0
            param, moments = ffi.new("float[37]", [2.0] * 37), [ffi.new("float[37]") for _ in range(2)]
            weights = ffi.new("tm_weights *", {"param": param, "grad": ffi.new("float[37]")})
            assert lib.tm_adamw_update(ffi.NULL, isa, hyper, 37, weights, *moments) == 0
            assert list(param) == [expected] * 37


def test_core_refuses_unknown_numbers() -> None:
    native = pytest.importorskip("tiermem._native")
    ffi, lib = native.ffi, native.lib
    out, weights = ffi.new("tm_pool **"), ffi.new("tm_weights *")

    def result(isa: int = lib.TM_ISA_PLAIN, numel: int = 0, decay_kind: int = 0) -> int:
        hyper = ffi.new("tm_adamw *", {"decay_kind": decay_kind})
        return int(lib.tm_adamw_update(ffi.NULL, isa, hyper, numel, weights, ffi.NULL, ffi.NULL))

    assert result() == 0
    assert result(isa=99) == result(numel=1) == result(decay_kind=3) == -22
    assert lib.tm_pool_create(0, out) == -22
    assert lib.tm_pool_create(10**6, out) == -22


def test_core_refuses_weights_that_do_not_go_together() -> None:
    native = pytest.importorskip("tiermem._native")
    ffi, lib = native.ffi, native.lib
    fp32, bf16, fp16 = lib.TM_FLOAT32, lib.TM_BFLOAT16, lib.TM_FLOAT16
    none, split, whole = lib.TM_MASTER_NONE, lib.TM_MASTER_SPLIT, lib.TM_MASTER_WHOLE
    accepted = {
        *((none, fp32, fp32), (split, bf16, fp32), (split, bf16, bf16)),
        *((whole, param, grad) for param in (bf16, fp16) for grad in (fp32, bf16, fp16)),
    }
    hyper = ffi.new("tm_sgd *")
    for form, param, grad in itertools.product(range(4), range(4), range(4)):
        weights = ffi.new(
            "tm_weights *", {"master_form": form, "param_dtype": param, "grad_dtype": grad}
        )
        expected = 0 if (form, param, grad) in accepted else -22
        assert lib.tm_sgd_update(ffi.NULL, 0, hyper, 0, weights, ffi.NULL) == expected
        assert lib.tm_sgd_update(ffi.NULL, 0, hyper, 1, weights, ffi.NULL) == -22  # no memory


@pytest.mark.parametrize("name", available_kernels())
def test_closed_kernels_say_so(name: str) -> None:
    kernels = open_kernels(name)
    kernels.close()
    kernels.close()
    with pytest.raises(StateError, match="closed"):
        kernels.accumulate(torch.zeros(8), torch.zeros(8), add=True)


def test_names() -> None:
    with open_kernels() as kernels:
        assert kernels.name == available_kernels()[0]
        assert kernels.num_threads >= 1
    with pytest.raises(ConfigError, match=r"'sse9'.*auto, .*torch"):
        open_kernels("sse9")
    with pytest.raises(ConfigError, match="num_threads is 0"):
        open_kernels("auto", 0)


def test_wrong_momentum(opened: dict[str, Kernels]) -> None:
    tensors = [torch.zeros(8) for _ in range(2)]
    plain, heavy = SGDStep(0.1, 0.0, 0.0, 0.0, False, True), SGDStep(0.1, 0.9, 0.0, 0.0, False, True)
    for kernels in opened.values():
        with pytest.raises(ValueError, match=r"momentum is None with the factor 0\.9.*a tensor"):
            kernels.sgd(heavy, tensors[0], None, None, tensors[1])
        with pytest.raises(ValueError, match=r"momentum is a tensor with the factor 0\.0.*None"):
            kernels.sgd(plain, tensors[0], None, torch.zeros(8), tensors[1])
        with pytest.raises(ValueError, match=r"momentum is torch\.float16.*must be torch\.float32"):
            kernels.sgd(heavy, tensors[0], None, torch.zeros(8).half(), tensors[1])
    with pytest.raises(ValueError, match=r"momentum is -0\.1"):
        SGDStep(0.1, -0.1, 0.0, 0.0, False, True)
    for momentum, dampening in ((0.0, 0.0), (0.9, 0.1)):
        with pytest.raises(ValueError, match=f"nesterov with momentum {momentum} and dampening"):
            SGDStep(0.1, momentum, dampening, 0.0, True, True)


def test_wrong_forms(opened: dict[str, Kernels]) -> None:
    step, good, half = SGDStep(0.1, 0.0, 0.0, 0.0, False, True), torch.zeros(8), torch.zeros(8).half()
    lo = torch.zeros(8, dtype=torch.int16)
    for kernels in opened.values():
        with pytest.raises(ValueError, match=r"param is torch\.float16.*must be torch\.float32"):
            kernels.sgd(step, half, None, None, good)
        with pytest.raises(ValueError, match=r"param is torch\.float16.*must be torch\.bfloat16"):
            kernels.sgd(step, half, lo, None, good)
        with pytest.raises(ValueError, match=r"grad is torch\.float16.*float32 or torch\.bfloat16"):
            kernels.sgd(step, half.bfloat16(), lo, None, half)
        with pytest.raises(ValueError, match=r"master is torch\.float64, must be torch\.int16"):
            kernels.sgd(step, half, good.double(), None, good)
        with pytest.raises(ValueError, match=r"master is torch\.float32 \(9,\)"):
            kernels.sgd(step, half, torch.zeros(9), None, good)
        with pytest.raises(ValueError, match=r"lo is torch\.float32.*must be torch\.int16"):
            kernels.adamw_split(STEP, half.bfloat16(), good, good, good, good)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 0)
    with pytest.raises(ValueError, match=r"beta2 is 1\.0"):
        AdamWStep(1e-3, 0.9, 1.0, 1e-8, 0.1, 1)
