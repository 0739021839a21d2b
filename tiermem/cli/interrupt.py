"""Ctrl-C that finishes what it is in the middle of."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType

EXIT_INTERRUPTED = 128 + signal.SIGINT


class Interrupt:
    """While open, the first Ctrl-C only sets ``requested``; the second raises KeyboardInterrupt.

    A KeyboardInterrupt in the middle of a backward or of a wait for I/O is safe but loses the step;
    the loop looks at ``requested`` between steps instead.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: object = None

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed: for places between steps."""
        if self.requested:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\ntiermem: stopping after this step; Ctrl-C again stops at once", file=sys.stderr)
