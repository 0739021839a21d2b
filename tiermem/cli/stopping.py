"""Ctrl-C, a closed terminal or a kill: what is in progress ends well, and the files are removed."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """While open, the first of these signals only sets ``event`` and says ``words``; a second raises
    KeyboardInterrupt.

    An exception in the middle of a backward, of a wait for I/O or of removing files would lose more
    than it has to; whoever works looks at ``event`` in between instead. SIGHUP that is ignored (nohup)
    stays so. ``code`` is the exit status by then, 0 without a signal.
    """

    def __init__(self, words: str) -> None:
        self.event = threading.Event()
        self.code = 0
        self._words = words
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> bool:
        """Whether there was a signal."""
        return self.event.is_set()

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was a signal: for places where nothing has to end first."""
        if self.requested:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.code = 128 + number
        self.event.set()
        self._say()

    def _say(self) -> None:
        """A terminal that is gone, a full disk or being in the middle of another message is no reason
        to end what is in progress otherwise than well."""
        if sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                print(f"\ntiermem: {self._words}", file=sys.stderr, flush=True)
