"""What is to be measured, and whether it can be. Sizes in bytes, times in seconds."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiermem.errors import ConfigError
from tiermem.io import BACKENDS, Op
from tiermem.io.checks import MAX_CHUNK_BYTES, MAX_DEPTH
from tiermem.memory.budget import available_host_memory
from tiermem.types import ALIGNMENT, format_bytes

WINDOW = 4
"""Requests queued per stream, so that the engine always finds the next one."""

REQUEST_BYTES = 8 << 20
"""A request is at least so long if the file allows it, so that its cost in Python does not show."""

MAX_THREADS = 16
MAX_MEMORY_SHARE = 0.5


class Mode(str, enum.Enum):
    """READ and WRITE go over the whole file; DUPLEX reads one half and writes the other at once."""

    READ = "read"
    WRITE = "write"
    DUPLEX = "duplex"

    @property
    def ops(self) -> tuple[Op, ...]:
        return {"read": (Op.READ,), "write": (Op.WRITE,), "duplex": (Op.READ, Op.WRITE)}[self.value]


class Pages(str, enum.Enum):
    """What the buffers lie on: 2 MiB pages, as the runtime's arena, or 4 KiB pages."""

    HUGE = "huge"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the grid. ``depth``: blocks in flight per thread and direction, or per thread of
    reads alone where ``write_depth`` is given."""

    block_bytes: int
    depth: int
    threads: int
    write_depth: int | None = None

    def depth_of(self, op: Op) -> int:
        """Blocks of ``op`` in flight per thread."""
        return self.depth if op is Op.READ or self.write_depth is None else self.write_depth

    @property
    def smallest_file_bytes(self) -> int:
        """Below it, a stream's requests in flight would overlap (in duplex, of half a file)."""
        deepest = max(self.depth_of(op) for op in Op)
        return 2 * self.threads * (WINDOW + 1) * -(-deepest // WINDOW) * self.block_bytes

    def request_bytes(self, region_bytes: int, op: Op) -> int:
        """How long requests of ``op`` are in a region of a file; `WINDOW` of them hold its depth."""
        blocks = max(-(-self.depth_of(op) // 2), -(-REQUEST_BYTES // self.block_bytes))
        room = region_bytes // self.block_bytes // (WINDOW + 1)
        return min(blocks, room) * self.block_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """One benchmark. Raises `ConfigError` that lists everything that cannot work.

    ``size_bytes`` is of the one file in each path. A run takes ``runtime`` seconds, or with 0 one pass
    over the file; there are ``loops`` runs of each mode, setting and kind of pages.
    """

    paths: tuple[Path, ...]
    modes: tuple[Mode, ...] = (Mode.READ, Mode.WRITE, Mode.DUPLEX)
    block_bytes: tuple[int, ...] = (2 << 20,)
    depths: tuple[int, ...] = (16,)
    threads: int = 1
    size_bytes: int = 1 << 30
    runtime: float = 2.0
    loops: int = 5
    backend: str = "auto"
    direct: bool = True
    pages: tuple[Pages, ...] = (Pages.HUGE,)
    verify: bool = False

    def __post_init__(self) -> None:
        problems = [*self._number_problems(), *self._block_problems()]
        if not problems:
            problems = [
                problem for problem in (self._size_problem(), self._memory_problem()) if problem
            ]
        if problems:
            raise ConfigError("; ".join(problems))

    def settings(self) -> Iterator[Setting]:
        """Every block size with every depth."""
        for block, depth in itertools.product(self.block_bytes, self.depths):
            yield Setting(block, depth, self.threads)

    @property
    def num_runs(self) -> int:
        points = len(self.block_bytes) * len(self.depths) * len(self.pages)
        return points * len(self.modes) * self.loops

    def regions(self, mode: Mode, setting: Setting) -> list[tuple[Op, int, int]]:
        """(operation, begin, end) of each stream in one file: disjoint, equally long, whole blocks."""
        parts = len(mode.ops) * setting.threads
        length = self.size_bytes // parts // setting.block_bytes * setting.block_bytes
        ops = [op for op in mode.ops for _ in range(setting.threads)]
        return [(op, index * length, (index + 1) * length) for index, op in enumerate(ops)]

    def buffer_bytes(self, setting: Setting) -> int:
        """Memory for the buffers of all streams of the mode that has most of them or the longest."""
        return max(
            sum(
                WINDOW * setting.request_bytes(end - begin, op)
                for op, begin, end in self.regions(mode, setting)
            )
            * len(self.paths)
            for mode in self.modes
        )

    def _number_problems(self) -> Iterator[str]:
        if not self.paths:
            yield "no path; name a directory on the drive to measure"
        if not self.modes:
            yield f"no mode; name one or more of {', '.join(mode.value for mode in Mode)}"
        for depth in self.depths:
            if not 1 <= depth <= MAX_DEPTH:
                yield f"depth is {depth}; it must be 1 to {MAX_DEPTH}"
        if not 1 <= self.threads <= MAX_THREADS:
            yield f"threads is {self.threads}; it must be 1 to {MAX_THREADS}"
        if not 1 <= self.loops <= 10_000:
            yield f"loops is {self.loops}; it must be 1 to 10000"
        if not 0 <= self.runtime <= 86_400:
            yield (
                f"runtime is {self.runtime:g} s; it must be 0 (one pass over the file) to 86400, "
                "a second or more for figures that say something"
            )
        if self.backend != "auto" and self.backend not in BACKENDS:
            yield f"backend is {self.backend!r}; it must be one of auto, {', '.join(BACKENDS)}"

    def _block_problems(self) -> Iterator[str]:
        for block in self.block_bytes:
            if block <= 0 or block % ALIGNMENT or block > MAX_CHUNK_BYTES:
                yield (
                    f"block size is {block} bytes; it must be a multiple of {ALIGNMENT} (what O_DIRECT "
                    f"asks for on every drive) up to {format_bytes(MAX_CHUNK_BYTES)}"
                )
        if self.size_bytes <= 0 or self.size_bytes % ALIGNMENT:
            yield f"size is {self.size_bytes} bytes; it must be a positive multiple of {ALIGNMENT}"

    def _size_problem(self) -> str:
        largest = max(self.settings(), key=lambda setting: setting.smallest_file_bytes)
        needed = largest.smallest_file_bytes
        if self.size_bytes >= needed:
            return ""
        return (
            f"size is {self.size_bytes} bytes ({format_bytes(self.size_bytes)}); blocks of "
            f"{format_bytes(largest.block_bytes)} at depth {largest.depth} with {largest.threads} "
            f"threads take a file of {needed} bytes ({format_bytes(needed)}): raise --size or lower "
            "--block-size, --depth or --threads"
        )

    def _memory_problem(self) -> str:
        largest = max(self.settings(), key=self.buffer_bytes)
        needed, memory = self.buffer_bytes(largest) * len(self.pages), available_host_memory()
        if needed <= memory.available * MAX_MEMORY_SHARE:
            return ""
        return (
            f"blocks of {format_bytes(largest.block_bytes)} at depth {largest.depth} need "
            f"{format_bytes(needed)} of buffers for {len(self.paths)} paths, and half of the "
            f"{format_bytes(memory.available)} of available memory may be used (bound by "
            f"{memory.source}): lower --block-size, --depth or --threads"
        )
