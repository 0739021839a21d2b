"""`Finding`: one thing that was looked at, how it is, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(str, enum.Enum):
    """How bad a finding is."""

    OK = "ok"  # as it should be
    NOTE = "note"  # works; something is missing that costs little, or that nobody may want
    PROBLEM = "problem"  # something does not work, or is much slower than it could be


@dataclass(frozen=True, slots=True)
class Finding:
    """``text`` says how ``topic`` is, with the values; ``remedy`` what to do (empty if nothing)."""

    topic: str
    level: Level
    text: str
    remedy: str = ""
    path: str = ""  # of the directory it is about


_REMEDIES = ("allow", "install", "join", "raise", "set", "use")


def split_remedy(words: str) -> tuple[str, str]:
    """A refusal in the I/O engine's words in its two parts, ``reason`` and ``remedy`` (maybe none)."""
    reason, _, remedy = words.rpartition(": ")
    return (reason, remedy) if remedy.startswith(_REMEDIES) else (words, "")
