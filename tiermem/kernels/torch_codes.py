"""8-bit codes of blocks of values by torch operations.

The format, and what it promises, is in ``native/src/kernels_codes.c`` ([Note: 8-bit codes]); the
results here are the same, bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiermem.kernels.base import QUANT_BLOCK_NUMEL, num_quant_blocks

_MANTISSA = 3
_SHIFT = 23 - _MANTISSA
_BIAS = (126 + _MANTISSA) << 23
_SCALE_MIN = 2.0**-92
_INFINITY_BITS = 0x7F800000
_SIGN = 0x80


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 ``values``."""
    blocks = _in_blocks(values)
    bits = blocks.view(torch.int32)
    # In 64 bits the magnitudes are unsigned: a negative value of an unsigned block comes last.
    magnitude = bits & 0x7FFFFFFF if signed else (blocks + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    largest = magnitude.amax(1)
    scales = _scales(largest, signed)
    bad, zero = scales.isnan(), scales == 0.0
    factor = torch.where(bad | zero, 0.0, _top(signed, values) / scales)
    y = (magnitude & 0x7FFFFFFF).int().view(torch.float32) * factor[:, None]
    codes = _nearest_code(y)
    if signed:
        codes |= (bits >> 24) & _SIGN
    else:
        codes |= ((codes == 0) & (magnitude != 0)).int()
    codes = torch.where(bad[:, None], 0, codes)
    return codes.to(torch.uint8).flatten()[: values.numel()], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The inverse, in fp32."""
    blocks = _in_blocks(codes).int()
    units = _unit(blocks & (_SIGN - 1) if signed else blocks)
    magnitude = units * _top(signed, scales).reciprocal() * scales[:, None]
    if signed:
        bits = magnitude.view(torch.int32) | torch.where(blocks >= _SIGN, -(2**31), 0).int()
        magnitude = bits.view(torch.float32)
    return magnitude.flatten()[: codes.numel()]


def _in_blocks(flat: Tensor) -> Tensor:
    """Rows of one block each, the last filled with zeros, which change no scale."""
    rows = num_quant_blocks(flat.numel())
    padded = flat.new_zeros(rows * QUANT_BLOCK_NUMEL)
    padded[: flat.numel()] = flat
    return padded.view(rows, QUANT_BLOCK_NUMEL)


def _unit(codes: Tensor) -> Tensor:
    normal = ((codes << _SHIFT) + _BIAS).view(torch.float32)
    return torch.where(codes < 1 << _MANTISSA, codes.float(), normal)


def _top(signed: bool, like: Tensor) -> Tensor:
    return _unit(torch.tensor(0x7F if signed else 0xFF, dtype=torch.int32, device=like.device))


def _scales(largest: Tensor, signed: bool) -> Tensor:
    """The scale of each block from the bits of its largest magnitude."""
    value = torch.where(largest < _INFINITY_BITS, largest, 0).int().view(torch.float32)
    small = torch.where(value > 0.0, _SCALE_MIN, 0.0)
    if signed:
        nothing = value * (_top(True, value) / _SCALE_MIN) <= 0.5
        small = torch.where(nothing, 0.0, small)
    scales = torch.where(value >= _SCALE_MIN, value, small)
    return torch.where(largest < _INFINITY_BITS, scales, float("nan"))


def _nearest_code(y: Tensor) -> Tensor:
    bits = y.view(torch.int32)
    half = (1 << (_SHIFT - 1)) - 1
    normal = (bits + half + ((bits >> _SHIFT) & 1) - _BIAS) >> _SHIFT
    return torch.where(y < 1 << _MANTISSA, y.round().int(), normal)
