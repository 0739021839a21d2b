"""`Message`: what an exchange is about, and the tag that tells its transfers from all others."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_INDEX_BITS, _NUMBER_BITS, _SIZE_BITS = 16, 6, 6  # with 3 for the kind: the 31 bits of a tag

MAX_INDEX = (1 << _INDEX_BITS) - 1


class Kind(enum.Enum):
    """What is exchanged; bytes are counted for each."""

    PARAMS = "parameters"
    GRADIENTS = "gradients"
    PRESENCE = "presence of gradients"
    SETUP = "set-up"
    VALUES = "values"
    WHOLE = "whole values"


_CODES = {kind: code for code, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True)
class Message:
    """What an exchange is about. ``index`` (0 to 65535) and ``kind`` are the same on all ranks for
    what belongs together; ``name`` is for people, and so is ``turn``: how often what it is about had
    been updated before."""

    kind: Kind
    index: int
    name: str
    turn: int = 0

    def __str__(self) -> str:
        turn = f" after {self.turn} update{'s' if self.turn > 1 else ''}" if self.turn else ""
        return f"{self.kind.value} of {self.name!r}{turn}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rank's part of an exchange with one peer: the ``number``-th exchange of its message."""

    what: Message
    number: int
    peer: int  # rank in the group
    sending: bool
    nbytes: int

    @property
    def tag(self) -> int:
        """31 bits. Messages of one tag arrive in the order in which they were sent, so a number that
        comes round again does no harm. The size is part of it because gloo ends the process when a
        message does not have the size that is expected: like this it waits, and is found out."""
        size = ((self.nbytes * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - _SIZE_BITS)
        number = self.number & ((1 << _NUMBER_BITS) - 1)
        tag = _CODES[self.what.kind] << _INDEX_BITS | self.what.index
        return (tag << _NUMBER_BITS | number) << _SIZE_BITS | size
