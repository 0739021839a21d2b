"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


def return_freed_memory() -> None:
    """Asks the C library to return what it keeps of freed memory.

    glibc keeps freed blocks below 32 MiB on its heap. After many tensors of different sizes (a model
    initialised module by module) that was seen to be more than the whole model; at fixed shapes, as in
    training steps, the heap is reused and this is not needed.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
