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
from tiermem.kernels.base import AdamWStep, require_parts

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
        numel = param.numel()
        pointers = (
            _pointer("param", param, numel, torch.float32),
            _pointer("exp_avg", exp_avg, numel, torch.float32),
            _pointer("exp_avg_sq", exp_avg_sq, numel, torch.float32),
            _pointer("grad", grad, numel, torch.float32),
        )
        _check(
            lib.tm_adamw_fp32(self._open_pool(), self._isa, _hyper(hyper), numel, *pointers),
            "adamw_fp32",
        )

    def adamw_split(
        self,
        hyper: AdamWStep,
        hi: Tensor,
        lo: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
    ) -> None:
        numel = hi.numel()
        pointers = (
            _pointer("hi", hi, numel, torch.bfloat16),
            _pointer("lo", lo, numel, torch.int16),
            _pointer("exp_avg", exp_avg, numel, torch.float32),
            _pointer("exp_avg_sq", exp_avg_sq, numel, torch.float32),
            _pointer("grad", grad, numel, torch.float32, torch.bfloat16),
        )
        error = lib.tm_adamw_split(
            self._open_pool(), self._isa, _hyper(hyper), numel, *pointers, _FLOATS[grad.dtype]
        )
        _check(error, "adamw_split")

    def adamw_master(
        self,
        hyper: AdamWStep,
        param: Tensor,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
    ) -> None:
        numel = param.numel()
        pointers = (
            _pointer("param", param, numel, torch.bfloat16, torch.float16),
            _FLOATS[param.dtype],
            _pointer("master", master, numel, torch.float32),
            _pointer("exp_avg", exp_avg, numel, torch.float32),
            _pointer("exp_avg_sq", exp_avg_sq, numel, torch.float32),
            _pointer("grad", grad, numel, *_FLOATS),
        )
        error = lib.tm_adamw_master(
            self._open_pool(), self._isa, _hyper(hyper), numel, *pointers, _FLOATS[grad.dtype]
        )
        _check(error, "adamw_master")

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


def _hyper(hyper: AdamWStep) -> Any:
    return ffi.new(
        "tm_adamw *",
        (
            hyper.decay,
            hyper.step_size,
            1 - hyper.beta1,
            hyper.beta2,
            1 - hyper.beta2,
            hyper.bias_correction2_sqrt,
            hyper.eps,
            hyper.grad_scale,
            hyper.weight_decay != 0.0,
        ),
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
