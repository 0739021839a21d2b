"""Arrays on huge pages, and how long one call on them takes."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import torch


def huge_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in anonymous memory advised to use huge pages."""
    region = mmap.mmap(-1, max(numel * dtype.itemsize, mmap.PAGESIZE))
    region.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(region, dtype=dtype, count=numel)
    return tensor.zero_()


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
