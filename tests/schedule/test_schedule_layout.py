"""Layouts: every parameter has its own aligned place, regions hold one kind each."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.types import ALIGNMENT
from tiermem.zero.layout import SEGMENT_ALIGNMENT_NUMEL, ParamSpec, dense_stride, plan_layout

SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(SPECS)
def test_places_are_disjoint_aligned_and_complete(kinds) -> None:
    specs = [
        ParamSpec(f"p{i}", torch.Size(shape), (), dtype, trainable)
        for i, (shape, dtype, trainable) in enumerate(kinds)
    ]
    layout = plan_layout(specs)
    assert layout.nbytes % ALIGNMENT == 0
    assert [segment.spec for segment in layout.segments] == specs
    spans = []
    for index, segment in enumerate(layout.segments):
        region = layout.regions[segment.region]
        assert index in region.params
        assert (region.dtype, region.trainable) == (segment.spec.dtype, segment.spec.trainable)
        assert region.byte_offset % ALIGNMENT == 0
        assert segment.start % SEGMENT_ALIGNMENT_NUMEL == 0
        assert segment.stop <= region.numel
        first = region.byte_offset + segment.start * region.dtype.itemsize
        spans.append((first, first + segment.numel * region.dtype.itemsize))
    spans = sorted(span for span in spans if span[0] < span[1])
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert not spans or spans[-1][1] <= layout.nbytes
    assert sorted(i for region in layout.regions for i in region.params) == list(range(len(specs)))


@given(st.permutations(range(4)))
def test_a_permuted_tensor_keeps_its_stride(order: list[int]) -> None:
    tensor = torch.empty(2, 3, 4, 5).permute(*order)
    assert dense_stride(tensor) == tensor.stride()


def test_a_tensor_with_holes_or_repeats_becomes_contiguous() -> None:
    assert dense_stride(torch.empty(4, 6)[:, ::2]) == (3, 1)
    assert dense_stride(torch.empty(1, 6).expand(4, 6)) == (6, 1)
