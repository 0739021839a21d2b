"""Ctrl-C, a closed terminal or a kill that ends a measurement and still removes its files."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """While open, the first of these signals only sets ``event``; a second one raises.

    SIGHUP that is ignored (nohup) stays so. ``code`` is the exit status by then, 0 without a signal.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.code = 0
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        self.code = 128 + number
        self.event.set()
        print("\ntiermem: stopping and removing the files", file=sys.stderr)
