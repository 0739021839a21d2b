"""What the requests of all backends have in common: how an outcome is read and never lost."""

from __future__ import annotations

import abc
import errno
import logging
import os
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended. ``status`` is 0 or -errno of the chunk at ``failed_at``."""

    status: int
    failed_at: int
    transferred: int


class PendingRequest(abc.ABC):
    """One transfer in flight. Backends say how to wait for its `Outcome`.

    ``owner`` keeps the memory alive. It is dropped when completion was *observed*, not when it
    happened: until then nobody has been told that the memory is free again.
    """

    def __init__(self, operation: str, offset: int, length: int, owner: object) -> None:
        self.operation = operation
        self.offset = offset
        self.length = length
        self._owner = owner
        self._outcome: Outcome | None = None
        self._reported = False

    @abc.abstractmethod
    def _await(self, timeout: float | None) -> Outcome | None:
        """The outcome, or None when ``timeout`` (seconds; None: no limit) has passed."""

    def _observe(self, timeout: float | None) -> Outcome | None:
        if self._outcome is None:
            self._outcome = self._await(timeout)
            if self._outcome is not None:
                self._owner = None
        return self._outcome

    def done(self) -> bool:
        """Whether it has completed (well or not). Never blocks."""
        return self._observe(0.0) is not None

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until complete; raises OSError on failure, TimeoutError after ``timeout``."""
        outcome = self._observe(timeout)
        if outcome is None:
            raise TimeoutError(f"{self._describe()} not complete after {timeout} s")
        if outcome.status < 0:
            self._reported = True
            raise self._error(outcome)

    def _describe(self) -> str:
        return f"{self.operation} of {self.length} bytes at offset {self.offset}"

    def failure(self) -> str:
        """Where and why it failed, without what it is; empty if it has not."""
        outcome = self._observe(0.0)
        return "" if outcome is None or outcome.status >= 0 else self._why(outcome)[1]

    def _why(self, outcome: Outcome) -> tuple[int, str]:
        code = -outcome.status
        reason = os.strerror(code)
        if code == errno.ENODATA:
            code, reason = errno.EIO, "incomplete transfer: the file ends there"
        where = self.offset + outcome.failed_at
        return code, f"at offset {where}: {reason} ({outcome.transferred} bytes were moved)"

    def _error(self, outcome: Outcome) -> OSError:
        code, why = self._why(outcome)
        return OSError(code, f"{self._describe()} failed {why}")

    def __del__(self) -> None:
        # The memory must outlive the transfer, and a failure that nobody waited for must be heard.
        try:
            outcome = self._observe(None)
        except Exception:  # a forked child, or an interpreter half gone: nothing to report
            return
        if outcome is not None and outcome.status < 0 and not self._reported:
            logger.error("nobody waited for a transfer that failed: %s", self._error(outcome).args[1])
