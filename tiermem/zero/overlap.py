"""Parameters that are different objects over the same memory.

A change to one is a change to the other, which would end at sharding, where each gets a place of its
own. Parts of one storage that do not touch (flattened RNN weights, slices of a fused weight) are fine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from tiermem.errors import StateError
from tiermem.zero import compat


class Named(Protocol):
    """A distinct parameter; `tiermem.zero.wrap.PlannedParam`."""

    name: str

    @property
    def part(self) -> torch.Tensor: ...


def check_storages(params: Iterable[Named]) -> None:
    """Raises `StateError` that names two of ``params`` that share elements."""
    by_storage: dict[int, list[Named]] = {}
    for each in params:
        if each.part.numel():
            by_storage.setdefault(compat.storage_key(each.part), []).append(each)
    for sharing in by_storage.values():
        sharing.sort(key=lambda each: _byte_range(each.part))
        reaching: list[Named] = []  # those before whose range may go on into the next
        for second in sharing:
            start = _byte_range(second.part)[0]
            reaching = [each for each in reaching if _byte_range(each.part)[1] > start]
            for first in reaching:
                if not _overlap(first.part, second.part):
                    continue
                raise StateError(
                    f"{first.name!r} and {second.name!r} are two parameters over the same memory; "
                    f"sharded, a change to one would no longer reach the other. Remedy: tie them by "
                    f"sharing the Parameter object ({second.name} = {first.name}, not its .data), or "
                    f"clone one of them"
                )
            reaching.append(second)


def _byte_range(param: torch.Tensor) -> tuple[int, int]:
    """Of the storage: the first byte, and the one after the last."""
    last = sum(int(n - 1) * int(step) for n, step in zip(param.shape, param.stride(), strict=True))
    start = int(param.storage_offset()) * param.element_size()
    return start, start + (last + 1) * param.element_size()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two parameters over one storage, whose ranges overlap, have an element in common."""
    (start, stop), (second_start, second_stop) = _byte_range(first), _byte_range(second)
    if first.dtype != second.dtype or (first.is_contiguous() and second.is_contiguous()):
        return True
    # Columns of one matrix lie between each other: mark the elements of one, look for the other's.
    size = (max(stop, second_stop) - start) // first.element_size()
    marks = torch.zeros(size, dtype=torch.bool, device="cpu")
    marks.as_strided(first.shape, first.stride()).fill_(True)
    offset = (second_start - start) // first.element_size()
    return bool(marks.as_strided(second.shape, second.stride(), offset).any())
