"""What an update kernel is: the interface, and the scalars of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

NORM_BLOCK_NUMEL = 65536
NORM_LANES = 16
"""The canonical order of a sum of squares (fp64): blocks of ``NORM_BLOCK_NUMEL`` elements from the
start of the array; within a block lane ``i`` of ``NORM_LANES`` sums the elements ``i mod 16`` in
index order; lanes are added pairwise (8, 4, 2, 1); blocks are added in index order."""

MAX_PARTS = 64
"""The most tensors that one :meth:`Kernels.reduce` adds up."""


QUANT_BLOCK_NUMEL = 256
"""Elements with a common scale in 8-bit codes; blocks are counted from the start of the array."""


def num_quant_blocks(numel: int) -> int:
    """The scales of ``numel`` elements in 8-bit codes; the last block may be shorter."""
    return -(-numel // QUANT_BLOCK_NUMEL)


@dataclass(frozen=True, slots=True)
class Moments8bit:
    """Adam's moments in 8-bit codes (uint8), with one fp32 scale per :data:`QUANT_BLOCK_NUMEL`.

    ``exp_avg`` has signed codes, ``exp_avg_sq`` unsigned ones (see :meth:`Kernels.quantize`).
    """

    exp_avg: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """The scalars of one update by Adam or AdamW (Loshchilov and Hutter, algorithm 2), frozen.

    ``step`` counts from 1. ``grad_scale`` multiplies each gradient first: it unscales, clips, and
    maximizes when negative; exactly 1.0 changes no bit. ``decoupled`` weight decay shrinks the
    parameter (AdamW), otherwise the decay is added to the gradient (Adam with L2 decay). Everything
    derived is computed in double, as torch's fused implementation does, and rounded to fp32 once by
    the kernel.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    decoupled: bool = True

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step is {self.step}, must be at least 1: the first update is step 1")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0 and below 1")

    @property
    def decay(self) -> float:
        """What decoupled decay multiplies the parameter by; not applied without weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - math.pow(self.beta1, self.step))

    @property
    def bias_correction2_sqrt(self) -> float:
        return math.sqrt(1 - math.pow(self.beta2, self.step))


@dataclass(frozen=True, slots=True)
class SGDStep:
    """The scalars of one SGD update as ``torch.optim.SGD`` defines it, frozen.

    ``first``: the momentum buffer is not read, it starts as the gradient. ``grad_scale`` as for
    :class:`AdamWStep`. Without momentum there is no buffer and no dampening.
    """

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.momentum < 0.0:
            raise ValueError(f"momentum is {self.momentum}, must be at least 0")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ValueError(
                f"nesterov with momentum {self.momentum} and dampening {self.dampening}, must have "
                f"momentum above 0 and dampening 0"
            )


class Kernels(Protocol):
    """Update kernels on one-dimensional contiguous tensors; each method works in place.

    All implementations give the same bits for any slicing of the same arrays (NaN payloads in fp32
    excepted). The native ones take CPU tensors and release the GIL; any thread may call, calls
    take turns. Wrong dtypes, lengths, layouts or devices raise ``ValueError``, a call after
    :meth:`close` raises ``StateError``.
    """

    @property
    def name(self) -> str:
        """``avx512``, ``avx2``, ``plain`` or ``torch``."""

    @property
    def num_threads(self) -> int: ...

    def adamw_fp32(
        self, hyper: AdamWStep, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor
    ) -> None:
        """One AdamW or Adam update of fp32 ``param`` and its fp32 moments from an fp32 gradient.

        Bit-equal to the vector path of ``torch.optim.AdamW(fused=True)`` (``Adam``, where the decay
        is not decoupled) on a CPU with AVX2 or AVX-512; the tails of torch's slices differ from it,
        and so from this, by an ulp.
        """

    def adamw_split(
        self,
        hyper: AdamWStep,
        hi: Tensor,
        lo: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
    ) -> None:
        """The same update of a split master: ``hi`` bf16, ``lo`` int16, ``grad`` bf16 or fp32."""

    def adamw_master(
        self,
        hyper: AdamWStep,
        param: Tensor,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
    ) -> None:
        """The update of fp32 ``master`` from a gradient in fp32, bf16 or fp16, with a rounded copy.

        ``master`` and its fp32 moments as by :meth:`adamw_fp32` on the same values; then bf16 or
        fp16 ``param`` is ``master`` rounded to nearest even, every NaN the same one. What ``param``
        was before does not matter.
        """

    def sgd(
        self,
        hyper: SGDStep,
        param: Tensor,
        master: Tensor | None,
        momentum: Tensor | None,
        grad: Tensor,
    ) -> None:
        """One SGD update of the parameter in any of its three forms.

        ``master`` None: ``param`` and ``grad`` fp32. ``master`` int16: ``param`` bf16 and ``master``
        are a split master as for :meth:`adamw_split`, ``grad`` bf16 or fp32. ``master`` fp32:
        ``param`` is its copy in bf16 or fp16 as for :meth:`adamw_master`, ``grad`` fp32, bf16 or
        fp16. ``momentum`` is fp32, and None exactly if ``hyper.momentum`` is 0.

        fp32 is bit-equal to the vector path of ``torch.optim.SGD(fused=True)``, as for
        :meth:`adamw_fp32`.
        """

    def adamw_8bit(
        self,
        hyper: AdamWStep,
        param: Tensor,
        master: Tensor | None,
        moments: Moments8bit,
        grad: Tensor,
    ) -> None:
        """One AdamW or Adam update of a parameter in any form, with moments in 8-bit codes.

        ``param``, ``master`` and ``grad`` as for :meth:`sgd`. The moments are dequantized, updated
        as by :meth:`adamw_fp32`, used for the parameter, and then quantized, block by block. A slice
        has to begin at a block. A moment that is not finite makes both its block's moments and, in
        the next update, the block's parameters NaN.
        """

    def quantize(self, values: Tensor, codes: Tensor, scales: Tensor, *, signed: bool) -> None:
        """fp32 ``values`` to 8-bit ``codes`` (uint8) and one fp32 scale per block.

        ``scales`` has :func:`num_quant_blocks` elements: the largest magnitude of each block. Codes
        are small floats relative to it, rounded to nearest even: sign, 4 bits of exponent, 3 of
        mantissa, or 5 and 3 without a sign. The relative error is at most 2^-4 down to 2^-15 of the
        scale (2^-31 unsigned), below that the error is at most 2^-18 (2^-34) of the scale. Zero is
        exact and so is the largest magnitude; a positive value of an unsigned block never becomes
        zero. A block with a NaN, an infinity, or, unsigned, a negative value gets the scale NaN and
        codes 0. Magnitudes below 2^-92 count as if the scale were 2^-92, if they do not vanish.
        """

    def dequantize(self, codes: Tensor, scales: Tensor, out: Tensor, *, signed: bool) -> None:
        """The values of ``codes`` in fp32; quantizing them again gives the same codes and scales.

        All values of a block with the scale NaN are NaN.
        """

    def split_master(self, master: Tensor, hi: Tensor, lo: Tensor) -> None:
        """fp32 ``master`` to ``bits(master) = (hi << 16) + lo``, ``hi`` rounded ties away.

        Exact for everything but NaN; every NaN becomes the one with ``hi`` = 0x7fc0, ``lo`` = 0.
        """

    def merge_master(self, hi: Tensor, lo: Tensor, out: Tensor) -> None:
        """The inverse of :meth:`split_master`; ``out`` is fp32."""

    def accumulate(self, destination: Tensor, source: Tensor, *, add: bool) -> float:
        """``destination += source`` or ``= source``, converting (round to nearest even).

        Returns the sum of squares of the result in the canonical order (:data:`NORM_BLOCK_NUMEL`).
        fp32, bf16 or fp16 each; adding into 16 bits is refused, since repeated it loses most of
        what is added. ``destination`` may be ``source``.
        """

    def reduce(self, destination: Tensor, parts: Sequence[Tensor], scale: float, *, add: bool) -> float:
        """``destination = [destination +] scale * (((parts[0] + parts[1]) + parts[2]) + ...)``.

        1 to :data:`MAX_PARTS` parts of one dtype, each of the destination's length; fp32, bf16 or
        fp16 each. Every operation is rounded to fp32, ``scale`` too; the result is rounded to the
        destination's dtype once (nearest even, every NaN of 16 bits the same one; a single part of
        that dtype, scaled by 1 and not added, is copied as it is). Returns the sum of squares of the
        new destination in the canonical order. A part may be the destination
        itself with the same dtype; other overlaps raise ``ValueError``.
        """

    def close(self) -> None:
        """Ends the threads; no other call may be running. Calling it again does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def require_momentum(hyper: SGDStep, momentum: Tensor | None) -> None:
    """Refuses a buffer that would not be used, and a missing one."""
    if (momentum is None) != (hyper.momentum == 0.0):
        raise ValueError(
            f"momentum is {'None' if momentum is None else 'a tensor'} with the factor "
            f"{hyper.momentum}, must be {'a tensor' if hyper.momentum != 0.0 else 'None'}"
        )


def require_parts(destination: Tensor, parts: Sequence[Tensor]) -> None:
    """Refuses a wrong number of parts, and parts that would change while they are read."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"{len(parts)} parts, must be 1 to {MAX_PARTS}; add more up in several calls")
    begin, end = destination.data_ptr(), destination.data_ptr() + destination.nbytes
    for index, part in enumerate(parts):
        address = part.data_ptr()
        if address == begin and part.dtype == destination.dtype:
            continue
        if address < end and begin < address + part.nbytes:
            raise ValueError(
                f"parts[{index}] ({part.dtype} at {address:#x}) overlaps destination "
                f"({destination.dtype} at {begin:#x}), must be apart from it, or the same tensor"
            )
