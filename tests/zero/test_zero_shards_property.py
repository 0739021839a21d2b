"""How groups are cut over ranks: disjoint, complete, balanced, aligned; for any shapes and numbers."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.types import ALIGNMENT
from tiermem.zero.layout import SEGMENT_ALIGNMENT_NUMEL, ParamSpec, plan_layout

dims = st.integers(min_value=0, max_value=97)
shapes = st.one_of(
    st.just(()), st.tuples(dims), st.tuples(dims, dims), st.tuples(dims, st.integers(1, 5), dims)
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8])


@st.composite
def specs(draw: st.DrawFn) -> list[ParamSpec]:
    result = []
    for number, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=9))):
        stride = tuple(torch.empty(shape, device="meta").stride())
        size = torch.Size(shape)
        result.append(ParamSpec(f"p{number}", size, stride, draw(dtypes), draw(st.booleans())))
    return result


@given(specs(), st.integers(min_value=1, max_value=67))
def test_shards(params: list[ParamSpec], world_size: int) -> None:
    layout = plan_layout(params, world_size)
    alone = plan_layout(params)
    for region, unpadded in zip(layout.regions, alone.regions, strict=True):
        spans = [region.shard(rank, world_size) for rank in range(world_size)]
        # Disjoint and complete: one after the other from the first element to the last.
        assert spans[0].start == 0
        assert spans[-1].stop == region.numel
        assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
        # Balanced: equal, and each larger than an even part of what there is by one unit at most.
        assert len({span.numel for span in spans}) == 1
        even = unpadded.numel * region.dtype.itemsize / world_size
        nbytes = spans[0].numel * region.dtype.itemsize
        assert even <= nbytes < even + ALIGNMENT or world_size == 1
        if world_size > 1:  # aligned, within the region and within the buffer
            assert nbytes % ALIGNMENT == 0
        assert region.byte_offset % ALIGNMENT == 0
        assert unpadded.params == region.params


@given(specs(), st.integers(min_value=1, max_value=67))
def test_every_element_has_one_owner(params: list[ParamSpec], world_size: int) -> None:
    layout = plan_layout(params, world_size)
    ends: dict[int, int] = {}
    for segment in layout.segments:
        region = layout.regions[segment.region]
        assert segment.start % SEGMENT_ALIGNMENT_NUMEL == 0
        assert segment.start >= ends.get(segment.region, 0)
        assert segment.stop <= region.numel
        ends[segment.region] = segment.stop
        owned = [
            region.shard(rank, world_size).meet(segment.start, segment.stop).numel
            for rank in range(world_size)
        ]
        assert sum(owned) == segment.numel
    for before, after in itertools.pairwise(layout.regions):
        assert before.byte_offset + before.nbytes <= after.byte_offset
    assert layout.nbytes >= layout.regions[-1].byte_offset + layout.regions[-1].nbytes
