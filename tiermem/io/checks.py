"""What every backend asks of its arguments."""

from __future__ import annotations

import operator

from tiermem.errors import ConfigError, StateError
from tiermem.io.base import QueueOptions
from tiermem.types import ALIGNMENT, format_bytes

MAX_CHUNK_BYTES = 1 << 30
MAX_DEPTH = 4096
MAX_OFFSET = (1 << 63) - 1
MAX_DESCRIPTOR = (1 << 31) - 1


def check_options(options: QueueOptions) -> None:
    """Raises ConfigError listing everything that a queue cannot work with."""
    problems = []
    size = options.chunk_bytes
    if size <= 0 or size % ALIGNMENT or size > MAX_CHUNK_BYTES:
        problems.append(
            f"chunk_bytes is {size}; it must be a positive multiple of {ALIGNMENT} "
            f"up to {format_bytes(MAX_CHUNK_BYTES)}"
        )
    for name, depth in (("read_depth", options.read_depth), ("write_depth", options.write_depth)):
        if not 1 <= depth <= MAX_DEPTH:
            problems.append(f"{name} is {depth}; it must be 1 to {MAX_DEPTH}")
    if problems:
        raise ConfigError("; ".join(problems))


def check_transfer(fd: int, offset: int, address: int, length: int) -> None:
    """Raises ValueError for a transfer that no file or memory can hold, TypeError for what are no whole
    numbers."""
    try:
        bits = fd | offset | address | length  # negative if one of them is; floats have none
    except TypeError:
        raise TypeError(
            f"fd {fd!r}, offset {offset!r}, address {address!r}, length {length!r}: each must be a "
            "whole number (an int)"
        ) from None
    if (
        not 0 <= bits <= MAX_OFFSET
        or offset + length > MAX_OFFSET
        or fd > MAX_DESCRIPTOR
        or (length and not address)
    ):
        raise ValueError(
            f"fd {fd}, offset {offset}, address {address}, length {length}: none may be negative, "
            f"the address not 0, fd at most {MAX_DESCRIPTOR}, the address and offset + length at most "
            f"{MAX_OFFSET}"
        )


def check_offset(offset: int, nbytes: int) -> int:
    """``offset`` as an int. ValueError or TypeError if no file can hold ``nbytes`` there."""
    try:
        begin = operator.index(offset)
    except TypeError:
        raise TypeError(
            f"offset is {offset!r}; it must be a whole number of bytes from the start of the file"
        ) from None
    if not 0 <= begin <= MAX_OFFSET - nbytes:
        raise ValueError(
            f"offset is {begin}; it must be 0 to {MAX_OFFSET - nbytes} for a transfer of {nbytes} bytes"
        )
    return begin


def closed_error() -> StateError:
    return StateError("the I/O engine is closed; open another with tiermem.io.open_engine()")


def forked_error(pid: int) -> StateError:
    return StateError(
        f"this I/O engine belongs to process {pid} that opened it; its threads do not exist in a "
        "forked child: open an engine after the fork, or use the 'spawn' start method"
    )
