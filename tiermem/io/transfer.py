"""`Transfer`: what `AsyncFile` returns, made of up to three requests of the engine; `wait` for many."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from tiermem.errors import IOContext, TierIOError
from tiermem.io.base import Request

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 1e-3


class Waitable(Protocol):
    """A `Transfer`, or a `Request` of an engine."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> None: ...


W = TypeVar("W", bound=Waitable)


class Transfer:
    """One read or write of an `AsyncFile`. It holds its memory until completion was observed.

    Any thread may wait, also several at once. A failure that nobody waits for is logged.
    """

    def __init__(
        self,
        context: IOContext,
        parts: Sequence[Request],
        lost: deque[TierIOError] | None = None,
    ) -> None:
        """``lost`` takes the failure that nobody waited for, if there is one."""
        self.context = context
        self._parts = tuple(parts)
        self._lost = lost
        self._raised = False

    @property
    def offset(self) -> int:
        """Where in the file it begins."""
        return self.context.offset

    @property
    def length(self) -> int:
        """Bytes."""
        return self.context.length

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return all(part.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> None:
        """Blocks, without the GIL, until it has ended; again and again with the same result.

        TimeoutError after ``timeout`` seconds (it goes on, and so may a further wait). TierIOError
        if it failed: EIO for a read past the end of the file, ECANCELED if it had not begun (or not
        all of it) when the file was closed, else what the system says.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        failures: list[tuple[Request, OSError]] = []
        for part in self._parts:  # all of them, before any failure: until then the memory is in use
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                part.wait(left)
            except TimeoutError:
                raise TimeoutError(f"{self.context}: not complete after {timeout} s") from None
            except OSError as error:
                failures.append((part, error))
        if failures:
            self._raised = True
            raise self._failure(*failures[0])

    def _failure(self, part: Request, first: OSError) -> TierIOError:
        if first.errno == errno.ECANCELED:
            detail = "the file was closed before all of it had begun; wait before close()"
        else:
            detail = part.failure()
        return TierIOError(first.errno or errno.EIO, self.context, detail)

    def __del__(self) -> None:
        # Its requests wait and log by themselves; here only what a flush has to know.
        lost = getattr(self, "_lost", None)
        if lost is None or self._raised:
            return
        try:
            self.wait()
        except TierIOError as error:
            logger.error("nobody waited for a transfer that failed: %s", error)
            lost.append(error.with_traceback(None))  # which would hold the memory
        except Exception:  # a forked child, or an interpreter half gone: nothing to report
            return

    def __repr__(self) -> str:
        return f"<Transfer: {self.context}, {'done' if self.done() else 'in flight'}>"


def wait(
    requests: Iterable[W], timeout: float | None = None, count: int | None = None
) -> tuple[list[W], list[W]]:
    """Blocks, without the GIL, until ``count`` (None: all) of ``requests`` have ended.

    Returns those that have and those that are pending, each in the order given. They may be of several
    files. Raises the first failure, in that order, of those that have ended, after all ``count``
    have; TimeoutError if fewer have after ``timeout`` seconds. Either way each request can still be
    asked by its own ``done`` and ``wait``.

    The oldest pending request is waited on; that another ended first is seen within a millisecond.
    """
    given = list(requests)
    needed = len(given) if count is None else count
    if not 0 <= needed <= len(given):
        raise ValueError(f"count is {count}; it must be 0 to {len(given)}, the number of requests")
    deadline = None if timeout is None else time.monotonic() + timeout
    ended = _until(given, needed, deadline)
    if sum(ended) < needed:
        raise TimeoutError(f"{sum(ended)} of {needed} transfers are complete after {timeout} s")
    done = [request for request, has in zip(given, ended, strict=True) if has]
    for request in done:
        request.wait()
    return done, [request for request, has in zip(given, ended, strict=True) if not has]


def _until(given: Sequence[Waitable], needed: int, deadline: float | None) -> list[bool]:
    """Which have ended, as soon as ``needed`` have or the time is over."""
    ended = [request.done() for request in given]
    while sum(ended) < needed:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        # When all are needed, the order in which they end does not matter.
        limit = left if needed == len(given) else min(_SLICE_SECONDS, left or _SLICE_SECONDS)
        _wait_quietly(given[ended.index(False)], limit)
        ended = [has or request.done() for has, request in zip(ended, given, strict=True)]
    return ended


def _wait_quietly(request: Waitable, timeout: float | None) -> None:
    with contextlib.suppress(OSError):  # a failure, or TimeoutError: the caller looks
        request.wait(timeout)
