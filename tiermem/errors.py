"""The exceptions of tiermem.

Every message names the offending value, the limit it broke and the remedy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


class TierMemError(Exception):
    """Base of everything tiermem raises on purpose."""


class ConfigError(TierMemError, ValueError):
    """A configuration that cannot work; lists every problem found, not only the first."""


class BudgetError(TierMemError, MemoryError):
    """Something does not fit its budget; says what would."""


class StateError(TierMemError, RuntimeError):
    """A call that is not possible in the present state; says which call is."""


class RankError(StateError):
    """Another rank failed, left, or does something else; says who, what it said, and what this rank
    was waiting for."""


@dataclass(frozen=True, slots=True)
class IOContext:
    """Where a transfer failed: enough to find the bytes by hand."""

    operation: str
    path: str
    offset: int
    length: int
    record: str = ""

    def __str__(self) -> str:
        what = f" ({self.record})" if self.record else ""
        if not self.length:  # not a transfer
            return f"{self.operation} at {self.path}{what}"
        return f"{self.operation} of {self.length} bytes at offset {self.offset} of {self.path}{what}"


class TierIOError(TierMemError, OSError):
    """A transfer that failed, was short or was corrupt. ``errno`` and ``context`` are set."""

    def __init__(self, errno: int, context: IOContext, detail: str = "") -> None:
        reason = os.strerror(errno) if errno else "incomplete transfer"
        OSError.__init__(self, errno, f"{context} failed: {reason}{'; ' + detail if detail else ''}")
        self.context = context

    def __str__(self) -> str:
        return str(self.args[1])
