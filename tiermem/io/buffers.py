"""Aligned memory for benchmarks and tests. The runtime has its own arena in `tiermem.memory`."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from tiermem.types import round_up

HUGE_PAGE_BYTES = 2 << 20


class AlignedBuffer:
    """Anonymous memory at a 2 MiB boundary, on huge pages where the system has them."""

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes is {nbytes}; it must be positive")
        self.nbytes = nbytes
        # Private: Python's default is shared memory, which gets no transparent huge pages.
        self._map = mmap.mmap(
            -1,
            round_up(nbytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = round_up(start, HUGE_PAGE_BYTES)
        self._offset = self.address - start
        advice = getattr(mmap, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
                self._map.madvise(advice)

    @property
    def view(self) -> memoryview:
        """The bytes. Release it before `close`, or the memory stays until it is collected."""
        return memoryview(self._map)[self._offset : self._offset + self.nbytes]

    def fill(self, value: int = 0) -> None:
        """Sets every byte, so that every page exists."""
        ctypes.memset(self.address, value, self.nbytes)

    def close(self) -> None:
        """Gives the memory back; no transfer may be in flight on it."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> AlignedBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def aligned_buffer(nbytes: int, *, huge_pages: bool = True) -> AlignedBuffer:
    """Memory for O_DIRECT transfers: aligned, on huge pages, its pages not yet touched."""
    return AlignedBuffer(nbytes, huge_pages=huge_pages)
