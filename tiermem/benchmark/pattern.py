"""Contents that say where they belong: for writing, and for checking what was read.

Every 8-byte word follows from the file's seed, its place in the file and the generation of its 4 KiB
page, which grows with each write. A page that was not written, was written elsewhere, is torn or
comes from another file therefore differs in every word.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import numpy as np

from tiermem.errors import IOContext, TierIOError
from tiermem.types import ALIGNMENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

_WORDS_PER_PAGE = ALIGNMENT // 8
_PLACE = np.uint64(0x9E3779B97F4A7C15)  # odd: a bijection on 64-bit numbers
_GENERATION = np.uint64(0xD1B54A32D192ED03)


class Pattern:
    """The contents of one file of ``nbytes``; offsets and lengths are multiples of 4096.

    Threads may use disjoint parts of the file at once.
    """

    def __init__(self, path: str, nbytes: int, seed: int) -> None:
        self._path = path
        self._seed = np.uint64(seed & (2**64 - 1))
        self._generations = np.zeros(nbytes // ALIGNMENT, np.uint64)

    def fill(self, target: memoryview, offset: int) -> None:
        """The next generation of what belongs at ``offset``, to be written there."""
        self._pages(offset, len(target))[:] += np.uint64(1)
        np.frombuffer(target, np.uint64)[:] = self._expected(offset, len(target))

    def check(self, found: memoryview, offset: int) -> None:
        """Raises `TierIOError` (EIO) if ``found``, read at ``offset``, is not what was written last."""
        expected = self._expected(offset, len(found))
        words: Words = np.frombuffer(found, np.uint64)
        wrong = np.flatnonzero(words != expected)
        if wrong.size == 0:
            return
        first = int(wrong[0])
        context = IOContext("verification", self._path, offset, len(found))
        detail = (
            f"{wrong.size * 8} of {len(found)} bytes are not what was written, first at offset "
            f"{offset + 8 * first}: {int(words[first]):016x} in place of {int(expected[first]):016x}; "
            "do not trust this drive, cable, file system or memory with data"
        )
        raise TierIOError(errno.EIO, context, detail)

    def _pages(self, offset: int, length: int) -> Any:
        return self._generations[offset // ALIGNMENT : (offset + length) // ALIGNMENT]

    def _expected(self, offset: int, length: int) -> Words:
        words: Words = np.arange(offset // 8, (offset + length) // 8, dtype=np.uint64)
        words *= _PLACE
        words ^= self._seed
        keys = self._pages(offset, length) * _GENERATION
        by_page = words.reshape(-1, _WORDS_PER_PAGE)
        by_page ^= keys[:, np.newaxis]
        return words
