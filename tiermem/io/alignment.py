"""What alignment O_DIRECT asks of a file's transfers."""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from dataclasses import dataclass
from typing import Any

from tiermem.types import ALIGNMENT

EDGE_BYTES = max(ALIGNMENT, mmap.PAGESIZE)
"""File offsets that are a multiple of this begin a block of every drive and a page of the cache."""

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MASK_AT, _ALIGNMENTS_AT = 0, 152  # linux/stat.h, struct statx


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """Bytes that addresses, and file offsets and lengths, are a multiple of. 0: no O_DIRECT."""

    memory: int
    offset: int


@functools.cache
def _statx() -> Any:
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)  # glibc 2.28
    if statx is not None:
        statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p]
    return statx


def direct_alignment(fd: int) -> DirectAlignment | None:
    """What the kernel says about an open file; None where it does not (before Linux 6.1, or the
    file system does not know)."""
    statx = _statx()
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return None
    if not struct.unpack_from("=I", answer, _MASK_AT)[0] & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", answer, _ALIGNMENTS_AT)
    return DirectAlignment(memory, offset)
