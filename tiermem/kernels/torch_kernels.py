"""The kernels by torch operations: for machines without a compiler, for other devices, for tests.

Bit-equal to the native kernels on every device with IEEE fp32 and fp64 (payloads of NaNs in fp32
excepted); many times slower, since torch has no operation that fuses a multiply and an add with
one rounding on all devices (see :func:`tiermem.kernels.torch_updates.fma`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from tiermem.errors import StateError
from tiermem.kernels import torch_codes
from tiermem.kernels.base import (
    NORM_BLOCK_NUMEL,
    NORM_LANES,
    QUANT_BLOCK_NUMEL,
    AdamWStep,
    Moments8bit,
    SGDStep,
    num_quant_blocks,
    require_momentum,
    require_parts,
)
from tiermem.kernels.torch_updates import adamw, sgd
from tiermem.kernels.weights import FLOATS, PLAIN, SPLIT, WHOLE, WeightForm, form_of

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

_CHUNK_NUMEL = 4 * NORM_BLOCK_NUMEL
"""Elements worked on at a time. Bounds the temporaries: about 16 of 8 bytes each, 32 MiB."""

_FLOAT_NAN_BITS = 0x7FC00000
_HALF_NAN_BITS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


@dataclass(frozen=True, slots=True)
class _Weights:
    """A parameter in one of its forms (:mod:`tiermem.kernels.weights`), with its gradient."""

    param: Tensor
    master: Tensor | None
    grad: Tensor

    @property
    def numel(self) -> int:
        return self.param.numel()

    def load(self, part: slice) -> tuple[Tensor, Tensor]:
        """Parameter and gradient in fp32."""
        if self.master is None:
            value = self.param[part]
        elif self.master.dtype == torch.int16:
            value = _merge(self.param[part], self.master[part])
        else:
            value = self.master[part]
        return value, self.grad[part].float()

    def store(self, part: slice, value: Tensor) -> None:
        if self.master is None:
            self.param[part] = value
        elif self.master.dtype == torch.int16:
            _split(value, self.param[part], self.master[part])
        else:
            self.master[part] = value
            _store(value, self.param[part])


class TorchKernels:
    """Implements :class:`tiermem.kernels.base.Kernels` on tensors of any one device."""

    name = "torch"

    def __init__(self) -> None:
        self._closed = False

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def adamw_fp32(
        self, hyper: AdamWStep, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor
    ) -> None:
        weights = self._weights(PLAIN, ("param", param), ("master", None), grad)
        self._adamw(hyper, weights, exp_avg, exp_avg_sq)

    def adamw_split(
        self,
        hyper: AdamWStep,
        hi: Tensor,
        lo: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
    ) -> None:
        weights = self._weights(SPLIT, ("hi", hi), ("lo", lo), grad)
        self._adamw(hyper, weights, exp_avg, exp_avg_sq)

    def adamw_master(
        self,
        hyper: AdamWStep,
        param: Tensor,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
    ) -> None:
        weights = self._weights(WHOLE, ("param", param), ("master", master), grad)
        self._adamw(hyper, weights, exp_avg, exp_avg_sq)

    def _adamw(self, hyper: AdamWStep, weights: _Weights, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        _require("exp_avg", exp_avg, weights.numel, torch.float32)
        _require("exp_avg_sq", exp_avg_sq, weights.numel, torch.float32)
        with torch.no_grad():
            for part in _chunks(weights.numel):
                value, grad = weights.load(part)
                weights.store(part, adamw(hyper, value, exp_avg[part], exp_avg_sq[part], grad))

    def sgd(
        self,
        hyper: SGDStep,
        param: Tensor,
        master: Tensor | None,
        momentum: Tensor | None,
        grad: Tensor,
    ) -> None:
        weights = self._weights(form_of(master), ("param", param), ("master", master), grad)
        require_momentum(hyper, momentum)
        if momentum is not None:
            _require("momentum", momentum, weights.numel, torch.float32)
        with torch.no_grad():
            for part in _chunks(weights.numel):
                buffer = None if momentum is None else momentum[part]
                value, gradient = weights.load(part)
                weights.store(part, sgd(hyper, value, buffer, gradient))

    def adamw_8bit(
        self,
        hyper: AdamWStep,
        param: Tensor,
        master: Tensor | None,
        moments: Moments8bit,
        grad: Tensor,
    ) -> None:
        weights = self._weights(form_of(master), ("param", param), ("master", master), grad)
        averages = (moments.exp_avg, moments.exp_avg_scale)
        squares = (moments.exp_avg_sq, moments.exp_avg_sq_scale)
        _require_codes("exp_avg", *averages, weights.numel)
        _require_codes("exp_avg_sq", *squares, weights.numel)
        with torch.no_grad():
            for part in _chunks(weights.numel):
                exp_avg = _load_codes(*averages, part, signed=True)
                exp_avg_sq = _load_codes(*squares, part, signed=False)
                value, gradient = weights.load(part)
                weights.store(part, adamw(hyper, value, exp_avg, exp_avg_sq, gradient))
                _store_codes(exp_avg, *averages, part, signed=True)
                _store_codes(exp_avg_sq, *squares, part, signed=False)

    def quantize(self, values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        numel = self._begin("values", values)
        _require("values", values, numel, torch.float32)
        _require_codes("codes", codes, scales, numel)
        with torch.no_grad():
            for part in _chunks(numel):
                _store_codes(values[part], codes, scales, part, signed=signed)

    def dequantize(self, codes: Tensor, scales: Tensor, out: Tensor, *, signed: bool) -> None:
        numel = self._begin("out", out)
        _require_codes("codes", codes, scales, numel)
        _require("out", out, numel, torch.float32)
        with torch.no_grad():
            for part in _chunks(numel):
                out[part] = _load_codes(codes, scales, part, signed=signed)

    def split_master(self, master: Tensor, hi: Tensor, lo: Tensor) -> None:
        numel = self._begin("master", master)
        _require("master", master, numel, torch.float32)
        _require("hi", hi, numel, torch.bfloat16)
        _require("lo", lo, numel, torch.int16)
        with torch.no_grad():
            for part in _chunks(numel):
                _split(master[part], hi[part], lo[part])

    def merge_master(self, hi: Tensor, lo: Tensor, out: Tensor) -> None:
        numel = self._begin("out", out)
        _require("hi", hi, numel, torch.bfloat16)
        _require("lo", lo, numel, torch.int16)
        _require("out", out, numel, torch.float32)
        with torch.no_grad():
            for part in _chunks(numel):
                out[part] = _merge(hi[part], lo[part])

    def accumulate(self, destination: Tensor, source: Tensor, *, add: bool) -> float:
        numel = self._begin("destination", destination)
        if add:
            _require("destination", destination, numel, torch.float32)
        _require("source", source, numel, *FLOATS)
        return self.reduce(destination, (source,), 1.0, add=add)

    def reduce(self, destination: Tensor, parts: Sequence[Tensor], scale: float, *, add: bool) -> float:
        numel = self._begin("destination", destination)
        _require("destination", destination, numel, *FLOATS)
        require_parts(destination, parts)
        dtype = parts[0].dtype
        for k, part in enumerate(parts):
            _require(f"parts[{k}]", part, numel, *((dtype,) if dtype in FLOATS else FLOATS))
        total = 0.0
        is_copy = len(parts) == 1 and scale == 1.0 and not add and dtype == destination.dtype
        with torch.no_grad():
            # As a tensor, and so in fp32: torch is free to use a Python number in double.
            factor = torch.tensor(scale, dtype=torch.float32, device=destination.device)
            for chunk in _chunks(numel):
                value = parts[0][chunk].float()
                for part in parts[1:]:
                    value = value + part[chunk].float()
                value = value * factor
                if add:
                    value = destination[chunk].float() + value
                if is_copy:
                    destination[chunk] = parts[0][chunk]
                else:
                    _store(value, destination[chunk])
                for block in _block_sums(destination[chunk].double()):
                    total += block
        return total

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _weights(
        self,
        form: WeightForm,
        param: tuple[str, Tensor],
        master: tuple[str, Tensor | None],
        grad: Tensor,
    ) -> _Weights:
        """The parameter and its master (each with its name in messages) and the gradient, checked."""
        numel = self._begin(*param)
        _require(*param, numel, *form.params)
        if form.master is not None and master[1] is not None:
            _require(master[0], master[1], numel, form.master)
        _require("grad", grad, numel, *form.grads)
        return _Weights(param[1], master[1], grad)

    def _begin(self, name: str, tensor: Tensor) -> int:
        if self._closed:
            raise StateError("kernels 'torch' are closed; open new ones with open_kernels()")
        return tensor.numel()


def _require(name: str, tensor: Tensor, numel: int, *dtypes: torch.dtype) -> None:
    if (
        tensor.dtype not in dtypes
        or tensor.numel() != numel
        or tensor.dim() != 1
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}; must be "
            f"{' or '.join(map(str, dtypes))} ({numel},), contiguous"
        )


def _require_codes(name: str, codes: Tensor, scales: Tensor, numel: int) -> None:
    _require(name, codes, numel, torch.uint8)
    _require(f"scale of {name}", scales, num_quant_blocks(numel), torch.float32)


def _load_codes(codes: Tensor, scales: Tensor, part: slice, *, signed: bool) -> Tensor:
    return torch_codes.dequantize(codes[part], scales[_blocks_of(part)], signed=signed)


def _store_codes(values: Tensor, codes: Tensor, scales: Tensor, part: slice, *, signed: bool) -> None:
    codes[part], scales[_blocks_of(part)] = torch_codes.quantize(values, signed=signed)


def _blocks_of(part: slice) -> slice:
    """The blocks of a chunk; chunks begin and end at blocks, but for the end of the array."""
    return slice(part.start // QUANT_BLOCK_NUMEL, num_quant_blocks(part.stop))


def _chunks(numel: int) -> Iterator[slice]:
    return (slice(begin, begin + _CHUNK_NUMEL) for begin in range(0, numel, _CHUNK_NUMEL))


def _store(value: Tensor, out: Tensor) -> None:
    """fp32 to any dtype, to nearest even; which NaN torch writes depends on the code that it runs."""
    out.copy_(value)
    if out.dtype in _HALF_NAN_BITS:
        out.view(torch.int16).masked_fill_(value.isnan(), _HALF_NAN_BITS[out.dtype])


def _split(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    bits = master.view(torch.int32)
    # Rounding would carry a NaN into other values; without NaNs nothing below overflows.
    bits = torch.where(master.isnan(), _FLOAT_NAN_BITS, bits)
    high = (bits + 0x8000) >> 16
    hi.view(torch.int16).copy_(high)
    lo.copy_(bits - (high << 16))


def _merge(hi: Tensor, lo: Tensor) -> Tensor:
    return ((hi.view(torch.int16).int() << 16) + lo.int()).view(torch.float32)


def _block_sums(values: Tensor) -> list[float]:
    """Sums of squares (fp64) of each block of the canonical order."""
    num_blocks = -(-values.numel() // NORM_BLOCK_NUMEL)
    # A single block ends with its last row: rows of zeros would change nothing.
    num_rows = min(NORM_BLOCK_NUMEL, values.numel() + NORM_LANES - 1) // NORM_LANES
    squares = values.new_zeros(num_blocks * num_rows * NORM_LANES)
    torch.mul(values, values, out=squares[: values.numel()])
    # Row r holds elements 16 r to 16 r + 15 of every block. Rows are added one by one: a sum over
    # the dimension would choose its own order.
    rows = squares.view(num_blocks, num_rows, NORM_LANES).transpose(0, 1).contiguous()
    lanes = rows[0].clone()
    for row in rows[1:].unbind():
        lanes += row
    half = NORM_LANES
    while half > 1:
        half //= 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return [float(value) for value in lanes.flatten().tolist()]
