"""What keeps a queue busy: transfers one after the other, round and round a part of a file."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiermem.benchmark.plan import WINDOW
from tiermem.errors import IOContext, TierIOError, TierMemError
from tiermem.io import AlignedBuffer, Engine, Op, Request, StorageFile

if TYPE_CHECKING:
    from tiermem.benchmark.pattern import Pattern


@dataclass(frozen=True, slots=True)
class Lane:
    """Where a stream works: the part of ``file`` from ``begin`` to ``end``, its queue, and its part of
    the buffer (from ``at``, `WINDOW` times ``request_bytes`` long). With a ``pattern`` what is written
    is made by it and what is read is checked."""

    engine: Engine
    queue: int
    file: StorageFile
    op: Op
    begin: int
    end: int
    buffer: AlignedBuffer
    at: int
    request_bytes: int
    pattern: Pattern | None = None


@dataclass(frozen=True, slots=True)
class _Sent:
    request: Request
    offset: int
    length: int
    at: int


class Stream:
    """One Python thread that tops up one lane; waiting and transferring hold no GIL.

    With ``once`` it ends after one pass, else with `halt`. ``error`` is what it ended by, ``ended`` the
    time (of `time.monotonic`) when its last transfer had.
    """

    def __init__(self, lane: Lane, *, once: bool = False) -> None:
        self.lane = lane
        self.error: Exception | None = None
        self.ended = 0.0
        self._once = once
        self._halt = threading.Event()
        self._sent: deque[_Sent] = deque()
        self._number = 0  # requests sent
        self._position = lane.begin
        self._thread = threading.Thread(target=self._main, name="tm-bench", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def halt(self) -> None:
        """Asks it to end; what is in flight is still waited for."""
        self._halt.set()

    def join(self, timeout: float | None = None) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            while not self._halt.is_set() and not self._is_over():
                if len(self._sent) == WINDOW:
                    self._settle()
                self._send()
            while self._sent:
                self._settle()
        except Exception as error:
            self.error = error
        finally:
            self._drain()
            self.ended = time.monotonic()

    def _is_over(self) -> bool:
        return self._once and self._number > 0 and self._position == self.lane.begin

    def _view(self, at: int, length: int) -> memoryview:
        start = self.lane.at + at
        return self.lane.buffer.view[start : start + length]

    def _send(self) -> None:
        lane = self.lane
        at = self._number % WINDOW * lane.request_bytes
        length = min(lane.request_bytes, lane.end - self._position)
        if lane.pattern is not None and lane.op is Op.WRITE:
            lane.pattern.fill(self._view(at, length), self._position)
        address = lane.buffer.address + lane.at + at
        request = lane.engine.submit(
            lane.queue, lane.op, lane.file.fd, self._position, address, length, owner=lane.buffer
        )
        self._sent.append(_Sent(request, self._position, length, at))
        self._number += 1
        self._position += length
        if self._position == lane.end:
            self._position = lane.begin

    def _settle(self) -> None:
        sent = self._sent.popleft()
        try:
            sent.request.wait()
        except TierMemError:
            raise
        except OSError as error:
            context = IOContext(
                self.lane.op.name.lower(), self.lane.file.path, sent.offset, sent.length
            )
            raise TierIOError(error.errno or errno.EIO, context, str(error.args[-1])) from error
        if self.lane.pattern is not None and self.lane.op is Op.READ:
            self.lane.pattern.check(self._view(sent.at, sent.length), sent.offset)

    def _drain(self) -> None:
        """After an error: nothing may be in flight in memory that is given back."""
        while self._sent:
            try:
                self._sent.popleft().request.wait()
            except Exception as error:
                self.error = self.error or error


def finish(streams: list[Stream]) -> None:
    """Halts and joins all; raises the first error."""
    for stream in streams:
        stream.halt()
    for stream in streams:
        stream.join()
    for stream in streams:
        if stream.error is not None:
            raise stream.error
