"""Totals of a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PathStats:
    """One path. ``allocated_bytes`` are preallocated on it, over all generations."""

    path: str
    allocated_bytes: int
    read_bytes: int
    written_bytes: int
    direct: bool


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Bytes of transfers that succeeded, padding to 4096 included."""

    paths: tuple[PathStats, ...]
    copied_bytes: int  # between buffers and the host parts of records
    host_bytes: int  # of host memory that records take
    num_records: int
    in_flight: int  # transfers
    conflict_waits: int  # times that a transfer had to wait for another one of its record
