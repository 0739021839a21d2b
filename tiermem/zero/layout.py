"""How the parameters of a group lie in its flat buffer, and what each rank owns of it. Pure.

A group is one byte buffer of *regions*; a region holds consecutive parameters that share dtype and
trainability, so that its optimizer records are indexed by the same element numbers. Regions start
on 4096-byte boundaries (they are read and written by themselves), parameters on 256 elements (whole
cache lines, and whole blocks of states that elements share: see [Note: state blocks] in rule.py).

[Note: shards] Over W ranks each region is padded to W equal *shards* of whole 4096-byte units; rank
r owns the r-th. Every region is cut by itself, so that a group's trainable part is spread as evenly
as its frozen part. Shards are what ranks read, update and write by themselves, and send each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiermem.types import ALIGNMENT, round_up

SEGMENT_ALIGNMENT_NUMEL = 256


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout needs to know of one parameter."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True, slots=True)
class Span:
    """The elements [start, stop) of a region."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def meet(self, start: int, stop: int) -> Span:
        """What lies in [start, stop) too; empty (``numel`` 0) if nothing does."""
        first = max(self.start, start)
        return Span(first, max(first, min(self.stop, stop)))


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's place: ``start`` is its first element within its region."""

    region: int
    start: int
    spec: ParamSpec

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def stop(self) -> int:
        return self.start + self.spec.numel


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """A run of parameters: ``byte_offset`` in the group's buffer, ``numel`` with padding."""

    index: int
    byte_offset: int
    numel: int
    dtype: torch.dtype
    trainable: bool
    params: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def shard(self, rank: int, world_size: int) -> Span:
        """The elements that ``rank`` owns; see [Note: shards]."""
        numel = self.numel // world_size
        return Span(rank * numel, (rank + 1) * numel)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Segments by parameter index, regions in buffer order, total bytes (multiple of 4096)."""

    segments: tuple[Segment, ...]
    regions: tuple[RegionLayout, ...]
    nbytes: int


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride to keep: the tensor's own if it is dense (channels-last, transposed), else the
    contiguous one."""
    expected = 1
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]))
    for d in order:
        if tensor.shape[d] == 1:
            continue
        if tensor.stride(d) != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= tensor.shape[d]
    return tuple(tensor.stride())


def plan_layout(specs: Sequence[ParamSpec], world_size: int = 1) -> GroupLayout:
    """Lays out ``specs`` for ``world_size`` ranks: parameters keep their order within a region."""
    kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault((spec.dtype, spec.trainable), []).append(index)
    segments: dict[int, Segment] = {}
    regions: list[RegionLayout] = []
    offset = 0
    for (dtype, trainable), members in kinds.items():
        position = 0
        for index in members:
            segments[index] = Segment(len(regions), position, specs[index])
            position = round_up(position + specs[index].numel, SEGMENT_ALIGNMENT_NUMEL)
        position = max(position, SEGMENT_ALIGNMENT_NUMEL)  # zero-size parameters alone take room too
        if world_size > 1:
            position = round_up(position, world_size * ALIGNMENT // dtype.itemsize)
        region = RegionLayout(len(regions), offset, position, dtype, trainable, tuple(members))
        regions.append(region)
        offset = round_up(offset + region.nbytes)
    return GroupLayout(tuple(segments[i] for i in range(len(specs))), tuple(regions), offset)
