"""What a runtime writes to its store, by record and range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

import tiermem
from tiermem.store.records import Record
from tiermem.zero.group import ParamGroup


class Written:
    """The ranges of records that are written from now on (bytes, as [start, stop))."""

    def __init__(self, runtime: tiermem.Runtime) -> None:
        self.ranges: list[tuple[Record, int, int]] = []
        store: Any = runtime.store
        write_many, mark_written = store.write_many, store.mark_written
        store.write_many = self._watched_spans(write_many)
        store.mark_written = self._watched_record(mark_written)

    def _watched_spans(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def write_many(spans: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            self.ranges.extend((span.record, span.start, span.stop) for span in spans)
            return real(spans, *args, **kwargs)

        return write_many

    def _watched_record(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def mark_written(record: Record) -> Any:
            self.ranges.append((record, 0, record.nbytes))
            return real(record)

        return mark_written

    @property
    def records(self) -> set[Record]:
        return {record for record, _, _ in self.ranges}

    def touches(self, record: Record, first: int, last: int) -> bool:
        """Whether anything of the bytes [first, last) of ``record`` was written."""
        return any(r is record and a < last and b > first for r, a, b in self.ranges)


def groups_of(model: nn.Module) -> list[ParamGroup]:
    """Of a sharded model, each once."""
    return list(dict.fromkeys(p._handle.group for p in model.parameters()))  # type: ignore[attr-defined]


def ranges_of(model: nn.Module, *, trained: bool) -> Iterator[tuple[Record, int, int]]:
    """Where this rank keeps those parameters of ``model`` that are trained, or those that are not
    (record, first byte, last byte)."""
    for group in groups_of(model):
        if group.record is None:
            continue
        for region in group.regions:
            if region.trainable == trained:
                first = group.record_offset(region, region.shard.start)
                yield group.record, first, first + region.shard.numel * region.layout.dtype.itemsize
