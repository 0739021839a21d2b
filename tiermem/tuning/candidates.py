"""The settings that a search chooses among. Pure. Sizes in bytes, depths in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tiermem.io import QueueOptions

_DEFAULTS = QueueOptions()

CHUNKS = tuple(1 << shift for shift in range(16, 25))  # 64 KiB to 16 MiB
DEPTHS = tuple(1 << shift for shift in range(8))  # 1 to 128
MAX_IN_FLIGHT_BYTES = 64 << 20
"""Per path and direction: what is queued already is what a demand read waits for."""

_COARSE = (  # the likeliest first
    *((2 << 20, 32), (1 << 20, 8), (2 << 20, 4), (1 << 20, 32)),
    *((256 << 10, 64), (8 << 20, 8), (256 << 10, 16), (8 << 20, 4)),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """How paths are driven; what `QueueOptions` and ``io`` of a configuration take."""

    backend: str
    chunk_bytes: int = _DEFAULTS.chunk_bytes
    read_depth: int = _DEFAULTS.read_depth
    write_depth: int = _DEFAULTS.write_depth

    @property
    def size(self) -> tuple[int, int, int]:
        """Smaller is better among equals: bytes in flight, then chunks in flight, then chunk size."""
        depths = self.read_depth + self.write_depth
        return self.chunk_bytes * depths, depths, self.chunk_bytes

    def fields(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Space:
    """``default`` (which always belongs to it) and everything like it that ``fits``."""

    default: Candidate
    backends: tuple[str, ...]
    fits: Callable[[Candidate], bool] = lambda _: True

    def coarse(self) -> list[Candidate]:
        """A few that differ much, the default first."""
        found = [
            dataclasses.replace(self.default, chunk_bytes=chunk, read_depth=depth, write_depth=depth)
            for chunk, depth in _COARSE
        ]
        return self._known([self.default, *found])

    def neighbours(self, centre: Candidate) -> list[Candidate]:
        """What one step in one direction leads to."""
        return self._known(
            [candidate for candidate in self._steps(centre) if candidate not in (centre, self.default)]
        )

    def _steps(self, centre: Candidate) -> Iterator[Candidate]:
        for name, values in (("chunk_bytes", CHUNKS), ("read_depth", DEPTHS), ("write_depth", DEPTHS)):
            value = getattr(centre, name)
            lower = [other for other in values if other < value][-1:]
            higher = [other for other in values if other > value][:1]
            for other in (*lower, *higher):
                changes: dict[str, Any] = {name: other}
                yield dataclasses.replace(centre, **changes)
        for backend in self.backends:
            yield dataclasses.replace(centre, backend=backend)

    def _known(self, candidates: list[Candidate]) -> list[Candidate]:
        return [c for c in dict.fromkeys(candidates) if c == self.default or self.allows(c)]

    def allows(self, candidate: Candidate) -> bool:
        """Whether it may be measured."""
        deepest = max(candidate.read_depth, candidate.write_depth)
        return deepest * candidate.chunk_bytes <= MAX_IN_FLIGHT_BYTES and self.fits(candidate)
