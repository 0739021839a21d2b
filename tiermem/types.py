"""Names that every layer shares. Pure Python: no torch, no numpy."""

from __future__ import annotations

import enum

ALIGNMENT = 4096
"""Every buffer address, file offset and transfer length is a multiple of this (bytes).

O_DIRECT asks for the logical block size of the device (512 or 4096); 4096 serves all of them and
is the page size.
"""


class Tier(enum.Enum):
    """Where bytes live. Without an accelerator DEVICE is CPU memory under its own budget."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Field(str, enum.Enum):
    """What a record holds. Other states of optimizers have plain strings for names."""

    PARAM = "param"  # the copy that computes
    MASTER_LO = "master_lo"  # int16 remainder: bits(master) = (hi << 16) + lo
    MASTER = "master"  # fp32
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"

    __str__ = str.__str__


class Purpose(enum.Enum):
    """What a block of memory is for; the ledger knows every byte by one of these."""

    GATHER = "gather"  # unsharded parameters
    RESIDENT = "resident"  # parts of records kept in host memory
    OPTIMIZER = "optimizer"  # slots of the update pipeline
    GRADIENT = "gradient"  # kept or staged gradients
    STAGING = "staging"  # host side of device transfers


def round_up(value: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def format_bytes(nbytes: float) -> str:
    """``nbytes`` for people, in binary units: ``format_bytes(3 << 20) == '3.0 MiB'``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def size_text(nbytes: int) -> str:
    """A size as people write block sizes: ``2 MiB``."""
    return format_bytes(nbytes).replace(".0 ", " ")
