"""Kernels of the native core. Importing this raises ImportError where it was not built."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from tiermem._native import ffi, lib
from tiermem.errors import StateError
from tiermem.kernels.base import (
    AdamWStep,
    Moments8bit,
    SGDStep,
    num_quant_blocks,
    require_momentum,
    require_parts,
)
from tiermem.kernels.weights import PLAIN, SPLIT, WHOLE, WeightForm, form_of

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

_ISAS: dict[str, int] = {
    "avx512": lib.TM_ISA_AVX512,
    "avx2": lib.TM_ISA_AVX2,
    "plain": lib.TM_ISA_PLAIN,
}
_FLOATS: dict[torch.dtype, int] = {
    torch.float32: lib.TM_FLOAT32,
    torch.bfloat16: lib.TM_BFLOAT16,
    torch.float16: lib.TM_FLOAT16,
}
_POINTERS: dict[torch.dtype, Any] = {
    torch.float32: ffi.typeof("float *"),
    torch.bfloat16: ffi.typeof("uint16_t *"),
    torch.float16: ffi.typeof("uint16_t *"),
    torch.int16: ffi.typeof("int16_t *"),
    torch.uint8: ffi.typeof("uint8_t *"),
}
_MASTER_FORMS: dict[str, int] = {
    PLAIN.name: lib.TM_MASTER_NONE,
    SPLIT.name: lib.TM_MASTER_SPLIT,
    WHOLE.name: lib.TM_MASTER_WHOLE,
}


def available_isas() -> tuple[str, ...]:
    """What this processor runs, best first."""
    best = lib.tm_isa_best()
    return tuple(name for name, isa in _ISAS.items() if isa <= best)


class NativeKernels:
    """Implements :class:`tiermem.kernels.base.Kernels` by the C kernels on their own threads."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self.num_threads = num_threads
        self._isa = _ISAS[name]
        self._pool: Any = None
        out = ffi.new("tm_pool **")
        _check(lib.tm_pool_create(num_threads, out), f"starting {num_threads} kernel threads")
        self._pool = out[0]

    def adamw_fp32(
        self, hyper: AdamWStep, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor
    ) -> None:
        weights = _weights(PLAIN, ("param", param), ("master", None), grad)
        self._adamw(hyper, weights, param.numel(), exp_avg, exp_avg_sq)

    def adamw_split(
        self,
        hyper: AdamWStep,
        hi: Tensor,
        lo: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
    ) -> None:
        weights = _weights(SPLIT, ("hi", hi), ("lo", lo), grad)
        self._adamw(hyper, weights, hi.numel(), exp_avg, exp_avg_sq)

    def adamw_master(
        self,
        hyper: AdamWStep,
        param: Tensor,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
    ) -> None:
        weights = _weights(WHOLE, ("param", param), ("master", master), grad)
        self._adamw(hyper, weights, param.numel(), exp_avg, exp_avg_sq)

    def _adamw(
        self, hyper: AdamWStep, weights: Any, numel: int, exp_avg: Tensor, exp_avg_sq: Tensor
    ) -> None:
        moments = (
            _pointer("exp_avg", exp_avg, numel, torch.float32),
            _pointer("exp_avg_sq", exp_avg_sq, numel, torch.float32),
        )
        pool = self._open_pool()
        error = lib.tm_adamw_update(pool, self._isa, _adamw_scalars(hyper), numel, weights, *moments)
        _check(error, "adamw")

    def sgd(
        self,
        hyper: SGDStep,
        param: Tensor,
        master: Tensor | None,
        momentum: Tensor | None,
        grad: Tensor,
    ) -> None:
        numel = param.numel()
        weights = _weights(form_of(master), ("param", param), ("master", master), grad)
        require_momentum(hyper, momentum)
        buffer = ffi.NULL
        if momentum is not None:
            buffer = _pointer("momentum", momentum, numel, torch.float32)
        pool = self._open_pool()
        error = lib.tm_sgd_update(pool, self._isa, _sgd_scalars(hyper), numel, weights, buffer)
        _check(error, "sgd")

    def adamw_8bit(
        self,
        hyper: AdamWStep,
        param: Tensor,
        master: Tensor | None,
        moments: Moments8bit,
        grad: Tensor,
    ) -> None:
        numel = param.numel()
        weights = _weights(form_of(master), ("param", param), ("master", master), grad)
        pointers = (
            *_codes("exp_avg", moments.exp_avg, moments.exp_avg_scale, numel),
            *_codes("exp_avg_sq", moments.exp_avg_sq, moments.exp_avg_sq_scale, numel),
        )
        pool, scalars = self._open_pool(), _adamw_scalars(hyper)
        codes = ffi.new("tm_moments_8bit *", pointers)
        error = lib.tm_adamw_8bit_update(pool, self._isa, scalars, numel, weights, codes)
        _check(error, "adamw_8bit")

    def quantize(self, values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        numel = values.numel()
        source = _pointer("values", values, numel, torch.float32)
        pointers = _codes("codes", codes, scales, numel)
        pool = self._open_pool()
        _check(lib.tm_quantize(pool, self._isa, numel, signed, source, *pointers), "quantize")

    def dequantize(self, codes: Tensor, scales: Tensor, out: Tensor, *, signed: bool) -> None:
        numel = out.numel()
        pointers = _codes("codes", codes, scales, numel)
        to = _pointer("out", out, numel, torch.float32)
        pool = self._open_pool()
        _check(lib.tm_dequantize(pool, self._isa, numel, signed, *pointers, to), "dequantize")

    def split_master(self, master: Tensor, hi: Tensor, lo: Tensor) -> None:
        numel = master.numel()
        pointers = (
            _pointer("master", master, numel, torch.float32),
            _pointer("hi", hi, numel, torch.bfloat16),
            _pointer("lo", lo, numel, torch.int16),
        )
        _check(lib.tm_split_master(self._open_pool(), numel, *pointers), "split_master")

    def merge_master(self, hi: Tensor, lo: Tensor, out: Tensor) -> None:
        numel = out.numel()
        pointers = (
            _pointer("hi", hi, numel, torch.bfloat16),
            _pointer("lo", lo, numel, torch.int16),
            _pointer("out", out, numel, torch.float32),
        )
        _check(lib.tm_merge_master(self._open_pool(), numel, *pointers), "merge_master")

    def accumulate(self, destination: Tensor, source: Tensor, *, add: bool) -> float:
        if add:
            _pointer("destination", destination, destination.numel(), torch.float32)
        _pointer("source", source, destination.numel(), *_FLOATS)
        return self.reduce(destination, (source,), 1.0, add=add)

    def reduce(self, destination: Tensor, parts: Sequence[Tensor], scale: float, *, add: bool) -> float:
        numel = destination.numel()
        to = _pointer("destination", destination, numel, *_FLOATS)
        require_parts(destination, parts)
        dtype = parts[0].dtype
        accepted = (dtype,) if dtype in _FLOATS else tuple(_FLOATS)
        pointers = [_pointer(f"parts[{k}]", part, numel, *accepted) for k, part in enumerate(parts)]
        # cffi keeps nothing alive that a struct points to: the list must outlive the call.
        array = ffi.new("const void *[]", pointers)
        reduction = ffi.new(
            "tm_reduction *",
            (to, _FLOATS[destination.dtype], _FLOATS[dtype], array, len(parts), scale, add),
        )
        out = ffi.new("double *")
        _check(lib.tm_reduce(self._open_pool(), self._isa, numel, reduction, out), "reduce")
        return float(out[0])

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            lib.tm_pool_free(pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            warnings.warn(f"unclosed kernels {self.name!r}", ResourceWarning, stacklevel=2, source=self)

    def _open_pool(self) -> Any:
        # NULL would be a valid pool for C: the call would run, silently, on one thread.
        if self._pool is None:
            raise StateError(f"kernels {self.name!r} are closed; open new ones with open_kernels()")
        return self._pool


def _check(error: int, what: str) -> None:
    if error != 0:
        raise OSError(-error, f"{what}: {os.strerror(-error)}")


def _adamw_scalars(hyper: AdamWStep) -> Any:
    kind, decay = lib.TM_DECAY_NONE, 0.0
    if hyper.weight_decay != 0.0:
        kind = lib.TM_DECAY_DECOUPLED if hyper.decoupled else lib.TM_DECAY_L2
        decay = hyper.decay if hyper.decoupled else hyper.weight_decay
    return ffi.new(
        "tm_adamw *",
        (
            decay,
            hyper.step_size,
            1 - hyper.beta1,
            hyper.beta2,
            1 - hyper.beta2,
            hyper.bias_correction2_sqrt,
            hyper.eps,
            hyper.grad_scale,
            kind,
        ),
    )


def _sgd_scalars(hyper: SGDStep) -> Any:
    return ffi.new(
        "tm_sgd *",
        (
            hyper.lr,
            hyper.momentum,
            1 - hyper.dampening,
            hyper.weight_decay,
            hyper.grad_scale,
            hyper.nesterov,
            hyper.first,
        ),
    )


def _weights(
    form: WeightForm, param: tuple[str, Tensor], master: tuple[str, Tensor | None], grad: Tensor
) -> Any:
    """The parameter and its master (each with its name in messages) and the gradient, for one call.

    cffi keeps nothing alive that a struct points to: the caller has the tensors.
    """
    numel = param[1].numel()
    to_param = _pointer(*param, numel, *form.params)
    to_master = ffi.NULL
    if form.master is not None and master[1] is not None:
        to_master = _pointer(master[0], master[1], numel, form.master)
    to_grad = _pointer("grad", grad, numel, *form.grads)
    numbers = (_FLOATS[param[1].dtype], _MASTER_FORMS[form.name], _FLOATS[grad.dtype])
    return ffi.new("tm_weights *", (to_param, to_master, to_grad, *numbers))


def _codes(name: str, codes: Tensor, scales: Tensor, numel: int) -> tuple[Any, Any]:
    """8-bit codes and their scales."""
    num_blocks = num_quant_blocks(numel)
    return (
        _pointer(name, codes, numel, torch.uint8),
        _pointer(f"scale of {name}", scales, num_blocks, torch.float32),
    )


def _pointer(name: str, tensor: Tensor, numel: int, *dtypes: torch.dtype) -> Any:
    if (
        tensor.dtype not in dtypes
        or tensor.numel() != numel
        or tensor.dim() != 1
        or not tensor.is_contiguous()
        or not tensor.is_cpu
    ):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}; must be "
            f"{' or '.join(map(str, dtypes))} ({numel},) on cpu, contiguous"
        )
    return ffi.cast(_POINTERS[tensor.dtype], tensor.data_ptr())
