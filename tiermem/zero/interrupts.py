"""Ctrl-C between our steps, never within one.

[Note: interrupts] Python raises KeyboardInterrupt between any two bytecodes of the main thread. In
the middle of our bookkeeping that would leave a transfer or an update that nobody knows of, and
`Runtime.close` would wait for it for ever. So our entry points put it off to their end. A second
Ctrl-C in the same one is raised at once, for an I/O that never comes back; the run is then TORN.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Deferral:
    """A context that may be entered again inside itself; see [Note: interrupts]. Python interrupts
    the main thread only; others may enter too, one at a time."""

    __slots__ = ("_depth", "_lock", "_main", "_noted", "_on_second", "_previous")

    def __init__(self, on_second: Callable[[BaseException], None]) -> None:
        self._on_second = on_second
        self._main = threading.main_thread().ident
        self._lock = threading.RLock()
        self._depth = 0
        self._noted = False
        self._previous: Any = None  # the handler that is put off, where there is one

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            self._lock.acquire()
            return
        if self._depth == 0:
            self._noted = False
            previous = signal.getsignal(signal.SIGINT)
            self._previous = previous if callable(previous) else None
            if self._previous is not None:
                signal.signal(signal.SIGINT, self._note)
            self._lock.acquire()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if threading.get_ident() != self._main:
            self._lock.release()
            return
        self._depth -= 1
        if self._depth:
            return
        self._lock.release()
        if self._previous is None:
            return
        previous = self._previous
        signal.signal(signal.SIGINT, previous)
        if self._noted:
            self._noted = False
            previous(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._noted:
            self._noted = True
            return
        error = KeyboardInterrupt("a second Ctrl-C while the first was put off")
        self._on_second(error)
        raise error


def uninterrupted(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """For methods of objects with a ``_runtime``: see [Note: interrupts]."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._runtime.interrupts:
            return method(self, *args, **kwargs)

    return call
