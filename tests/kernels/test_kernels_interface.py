"""Wrong tensors, names and numbers are refused with the value and the limit; nothing is touched."""

from __future__ import annotations

import pytest
import torch

from tiermem.errors import ConfigError, StateError
from tiermem.kernels import AdamWStep, Kernels, available_kernels, open_kernels
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
    for isa in range(lib.tm_isa_best() + 1):
        for has_decay, expected in ((0, 2.0), (1, 1.0)):
            hyper = ffi.new("tm_adamw *", {"decay": 0.5, "has_decay": has_decay, "eps": 1.0})
            hyper.bias_correction2_sqrt = 1.0
            param, zeros = ffi.new("float[37]", [2.0] * 37), ffi.new("float[37]")
            assert lib.tm_adamw_fp32(ffi.NULL, isa, hyper, 37, param, zeros, zeros, zeros) == 0
            assert list(param) == [expected] * 37


def test_core_refuses_unknown_numbers() -> None:
    native = pytest.importorskip("tiermem._native")
    ffi, lib = native.ffi, native.lib
    hyper, out = ffi.new("tm_adamw *"), ffi.new("tm_pool **")
    assert lib.tm_adamw_fp32(ffi.NULL, 99, hyper, 0, *[ffi.NULL] * 4) == -22
    assert lib.tm_adamw_fp32(ffi.NULL, lib.TM_ISA_PLAIN, hyper, 1, *[ffi.NULL] * 4) == -22
    assert lib.tm_adamw_split(ffi.NULL, lib.TM_ISA_PLAIN, hyper, 0, *[ffi.NULL] * 5, 9) == -22
    assert lib.tm_pool_create(0, out) == -22
    assert lib.tm_pool_create(10**6, out) == -22


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


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step is 0"):
        AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, 0)
    with pytest.raises(ValueError, match=r"beta2 is 1\.0"):
        AdamWStep(1e-3, 0.9, 1.0, 1e-8, 0.1, 1)
