"""Totals of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.types import format_bytes


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

    def describe(self, shares: Sequence[float], stripes: str) -> str:
        """For people; ``shares`` are the paths', ``stripes`` what the store says of how it cuts."""
        host = format_bytes(self.host_bytes)
        lines = [f"{self.num_records} records, {host} of them in host memory, {stripes}"]
        for share, path in zip(shares, self.paths, strict=True):
            how = "O_DIRECT" if path.direct else "buffered"
            lines.append(f"{path.path}: {share:.0%}, {format_bytes(path.allocated_bytes)}, {how}")
        return "\n".join(lines)
