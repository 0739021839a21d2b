"""`GroupGradient`: where the gradients of one group are, and how they lie in their buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tiermem.memory.arena import Block
from tiermem.store.transfer import Transfer
from tiermem.types import round_up
from tiermem.zero.layout import Span

if TYPE_CHECKING:
    from tiermem.zero.group import ParamGroup, Region
    from tiermem.zero.param import ShardedParam


@dataclass(slots=True, eq=False)
class GroupGradient:
    """The gradients of one group: of the elements that this rank owns, or (``full``) of all, before
    they are reduced over the ranks and, where they are reduced in place, after it. ``tensor`` is None
    while they are on NVMe only.

    The buffer's dtype is the parameters', or fp32 (``widened``).
    Owned by the training thread until a pending update takes it, then by that update.
    """

    group: ParamGroup
    full: bool = False
    present: set[int] = field(default_factory=set)
    sum_squares: dict[int, float] = field(default_factory=dict)  # of the values before ``scale``
    scale: float = 1.0  # clipping multiplies the values by it, inside the update
    widened: bool = False
    tensor: torch.Tensor | None = None
    block: Block | None = None
    staged: bool = False  # the block is one of the staging buffers
    transfer: Transfer | None = None  # the spill in flight
    pinned: bool = False  # an update reads ``tensor``
    used: bool = False  # nobody will read it again
    summing: bool = False  # ranks send each other parts of it, or what is added to it

    @property
    def nbytes(self) -> int:
        return gradient_bytes(self.group, self.widened, full=self.full)

    def span(self, region: Region) -> Span:
        """The elements of ``region`` that the buffer holds."""
        return Span(0, region.layout.numel) if self.full else region.owned

    def dtype(self, region: Region) -> torch.dtype:
        return torch.float32 if self.widened else region.layout.dtype

    def offset(self, region: Region) -> int:
        """The first byte of ``region``'s gradients in the buffer (a multiple of 4096)."""
        return _offset(self.group, region, self.widened, self.full)

    def region_view(self, region: Region) -> torch.Tensor:
        """The gradients of ``region`` in memory, 1-D: the elements of `span`."""
        assert self.tensor is not None
        dtype, start = self.dtype(region), self.offset(region)
        return self.tensor[start : start + self.span(region).numel * dtype.itemsize].view(dtype)

    def held(self, param: ShardedParam) -> Span:
        """The elements of ``param``, counted from its first, that the buffer holds."""
        segment = param.segment
        within = self.span(param.region).meet(segment.start, segment.stop)
        return Span(within.start - segment.start, within.stop - segment.start)

    def param_view(self, param: ShardedParam) -> torch.Tensor:
        """The gradient of ``param``, 1-D: the elements of `held`."""
        region = param.region
        held, first = self.held(param), param.segment.start - self.span(region).start
        return self.region_view(region)[first + held.start : first + held.stop]


def _offset(group: ParamGroup, until: Region | None, widened: bool, full: bool) -> int:
    offset = 0
    for region in group.regions:
        if region is until:
            break
        if region.trainable:
            itemsize = 4 if widened else region.layout.dtype.itemsize
            offset += round_up((region.layout if full else region.owned).numel * itemsize)
    return offset


def gradient_bytes(group: ParamGroup, widened: bool, *, full: bool = False) -> int:
    """Bytes of a buffer for gradients of ``group``."""
    return _offset(group, None, widened, full)


def flatten_like(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``tensor``'s elements in the memory order of a dense tensor with ``stride``."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.stride() != stride:
        same = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = same.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
