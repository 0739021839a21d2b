"""The engine without native code: Python threads over ``preadv`` and ``pwritev``.

Slower than the native engine and complete: the same cutting, priorities, limits, short transfers
and faults. It is the reference in tests.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence

from tiermem.io import checks
from tiermem.io.base import EngineStats, Fault, Move, Op, Priority, QueueOptions
from tiermem.io.latency import Latency
from tiermem.io.thread_queue import CopyQueue, FaultPoint, PathQueue, ThreadRequest

logger = logging.getLogger(__name__)


class ThreadsEngine:
    """`tiermem.io.base.Engine` in pure Python."""

    name = "threads"
    registration = "threads has no use for registered memory"

    def __init__(self) -> None:
        self.reason = "asked for"
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of _closed and of adding to _queues
        self._closed = False
        self._faults = FaultPoint()
        self._queues: list[PathQueue] = []
        self._copies = CopyQueue()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise checks.forked_error(self._pid)
        if self._closed:
            raise checks.closed_error()

    def add_queue(self, options: QueueOptions) -> int:
        """A new path queue; its number."""
        checks.check_options(options)
        self._check()  # first without the lock, which may have been held when this child forked
        with self._lock:
            self._check()
            self._queues.append(PathQueue(options, self._faults))
            return len(self._queues) - 1

    def submit(
        self,
        queue: int,
        op: Op,
        fd: int,
        offset: int,
        address: int,
        length: int,
        *,
        owner: object = None,
        priority: Priority = Priority.BACKGROUND,
    ) -> ThreadRequest:
        """Starts a transfer and returns at once."""
        move = (fd, offset, address, length)
        return self.submit_many(queue, op, (move,), owner=owner, priority=priority)[0]

    def submit_many(
        self,
        queue: int,
        op: Op,
        moves: Sequence[Move],
        *,
        owner: object = None,
        priority: Priority = Priority.BACKGROUND,
    ) -> list[ThreadRequest]:
        """Starts many transfers under one lock; all of them or none."""
        self._check()
        for move in moves:
            checks.check_transfer(*move)
        if not 0 <= queue < len(self._queues):
            raise ValueError(f"queue is {queue}; there are {len(self._queues)}")
        operation = "read" if op == Op.READ else "write"
        requests = [
            ThreadRequest(operation, fd, int(offset), int(address), int(length), owner)
            for fd, offset, address, length in moves
        ]
        started = [request for request in requests if request.length]
        self._start(requests, lambda: self._queues[queue].push(Op(op), Priority(priority), started))
        for request in requests:
            if not request.length:
                request.finish()
        return requests

    @staticmethod
    def _start(requests: Sequence[ThreadRequest], push: Callable[[], None]) -> None:
        try:
            push()
        except BaseException:
            for request in requests:
                request.finish()  # never started: its finalizer must not wait
            raise

    def copy(
        self, destination: int, source: int, length: int, *, owner: object = None
    ) -> ThreadRequest:
        """Starts a memory-to-memory copy (no overlap) and returns at once."""
        self._check()
        checks.check_transfer(0, 0, min(destination, source), length)
        request = ThreadRequest("copy", -1, 0, destination, length, owner)
        request.source = source
        self._start((request,), lambda: self._copies.push(request))
        return request

    def cancel(self, queue: int) -> None:
        """Ends all of a queue that no thread has begun yet with ECANCELED; does not wait."""
        self._check()
        self._queues[queue].cancel()

    def register(self, address: int, length: int) -> None:
        """Does nothing: see `registration`."""
        self._check()

    def unregister(self, address: int) -> None:
        """Does nothing."""
        self._check()

    def inject(self, fault: Fault | None) -> None:
        """Arms one fault, or disarms with None; counting starts anew."""
        self._check()
        self._faults.arm(fault)

    def latency(self, queue: int, op: Op) -> Latency:
        """How long the system calls for the chunks of one queue and operation took."""
        if not 0 <= queue < len(self._queues):
            raise ValueError(f"queue is {queue}; there are {len(self._queues)}")
        return self._queues[queue].latency[op].read()

    def _everything(self) -> list[PathQueue | CopyQueue]:
        return [*self._queues, self._copies]

    def stats(self) -> EngineStats:
        total = EngineStats(copied_bytes=self._copies.copied_bytes)
        for number, queue in enumerate(self._queues):
            part = queue.stats
            total.read_bytes += part.read_bytes
            total.written_bytes += part.written_bytes
            total.read_chunks += part.read_chunks
            total.written_chunks += part.written_chunks
            total.submit_calls += part.submit_calls
            total.retries += part.retries
            total.max_in_flight = max(total.max_in_flight, part.max_in_flight)
            total.by_queue[number] = (part.read_bytes, part.written_bytes)
        return total

    def close(self) -> None:
        """Drains and joins the threads. Idempotent."""
        if self._pid != os.getpid():
            self._closed = True  # a forked child has no threads to join
            return
        with self._lock:  # held throughout: a second caller returns when all is drained, too
            self._closed = True
            for queue in self._everything():
                queue.stop()
            for queue in self._everything():
                queue.join()

    def __enter__(self) -> ThreadsEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            warnings.warn("an I/O engine was not closed", ResourceWarning, source=self, stacklevel=2)
            for queue in self._everything():
                queue.stop()
