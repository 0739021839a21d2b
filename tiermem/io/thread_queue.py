"""Queues of the engine without native code: Python threads that move chunks, or copy."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiermem.io import checks
from tiermem.io.base import EngineStats, Fault, FaultKind, Op, Priority, QueueOptions
from tiermem.io.latency import LatencyCounter
from tiermem.io.request import Outcome, PendingRequest
from tiermem.types import ALIGNMENT

logger = logging.getLogger(__name__)

_MAX_WORKERS = 4  # per queue and direction; more do not help under the GIL
_COPY_CHUNK_BYTES = 4 << 20
_BACKOFF_TRIES = 30
_BACKOFF_SECONDS = 50e-6
_BACKOFF_DOUBLINGS = 10
_MAX_REFUSALS = 100


class ThreadRequest(PendingRequest):
    """A transfer of the threads engine. The last four fields are guarded by the queue's lock."""

    def __init__(
        self, operation: str, fd: int, offset: int, address: int, length: int, owner: object
    ) -> None:
        super().__init__(operation, offset, length, owner)
        self.fd = fd
        self.address = address
        self.source = 0  # of a copy
        self.pid = os.getpid()
        self._finished = threading.Event()
        self._ended: Outcome | None = None
        self.issued = 0
        self.outstanding = 0
        self.status, self.failed_at = 0, 0
        self.transferred = 0

    def _await(self, timeout: float | None) -> Outcome | None:
        if not self._finished.is_set() and self.pid != os.getpid():
            raise checks.forked_error(self.pid)
        self._finished.wait(timeout)
        return self._ended

    def note(self, status: int, at: int, transferred: int) -> None:
        """One chunk's end; the failure at the lowest offset is the one that is reported."""
        self.transferred += transferred
        if status < 0 and (self.status == 0 or at < self.failed_at):
            self.status, self.failed_at = status, at
        self.outstanding -= 1

    def cancel_rest(self) -> None:
        """What has not been cut into chunks is not going to be."""
        if self.status == 0 or self.issued < self.failed_at:
            self.status, self.failed_at = -errno.ECANCELED, self.issued
        self.issued = self.length

    def finish(self) -> None:
        self._ended = Outcome(self.status, self.failed_at, self.transferred)
        self._finished.set()


class FaultPoint:
    """Counts chunks since arming and says which one is hit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: Fault | None = None
        self._seen = 0
        self._left = 0

    def arm(self, fault: Fault | None) -> None:
        with self._lock:
            self._armed, self._seen = fault, 0
            self._left = fault.repeat if fault else 0

    def next(self, op: Op) -> Fault | None:
        with self._lock:
            armed = self._armed
            if armed is None or self._left == 0 or armed.op != op:
                return None
            self._seen += 1
            if self._seen <= armed.nth:
                return None
            # Repeats of a refused submission all go to the attempts of one chunk.
            self._left = 0 if armed.kind == FaultKind.SUBMIT_ERROR else self._left - 1
            return armed


@dataclass(slots=True)
class _Chunk:
    """A part of a request on its way; belongs to the worker that cut it."""

    request: ThreadRequest
    at: int
    length: int
    fault: Fault | None
    moved: int = 0
    calls: int = 0
    retries: int = 0


def _refused(chunk: _Chunk, fault: Fault) -> int:
    """Plays injected refusals of the submission; the status they end in (0: accepted at last)."""
    for attempt in range(fault.repeat):
        chunk.calls += 1
        if fault.errno not in (errno.EINTR, errno.EAGAIN):
            return -fault.errno
        chunk.retries += 1
        if fault.errno == errno.EAGAIN:
            if attempt == _BACKOFF_TRIES:
                return -errno.EAGAIN
            time.sleep(_BACKOFF_SECONDS * 2 ** min(attempt, _BACKOFF_DOUBLINGS))
    return 0


def _shortened(chunk: _Chunk) -> int:
    half = chunk.length // 2
    return half - half % ALIGNMENT if half >= ALIGNMENT else half


def _call(op: Op, chunk: _Chunk, view: memoryview) -> int:
    """How many bytes the system moved to or from ``view``, or -errno."""
    request = chunk.request
    transfer: Callable[[int, list[memoryview], int], int]
    transfer = os.preadv if op == Op.READ else os.pwritev
    refusals = 0
    while True:
        chunk.calls += 1
        try:
            return transfer(request.fd, [view], request.offset + chunk.at + chunk.moved)
        except BlockingIOError:  # EAGAIN; os.preadv repeats EINTR by itself
            if refusals == _MAX_REFUSALS:
                return -errno.EAGAIN
            refusals += 1
            chunk.retries += 1
        except OSError as error:
            return -(error.errno or errno.EIO)


def _run_chunk(op: Op, chunk: _Chunk) -> int:
    """Moves a chunk; its status. Short transfers continue (see the note in engine_queue.c)."""
    request = chunk.request
    fault = chunk.fault
    report_at_most = chunk.length
    if fault is not None:
        if fault.kind == FaultKind.ERROR:
            return -fault.errno
        if fault.kind == FaultKind.SUBMIT_ERROR:
            status = _refused(chunk, fault)
            if status:
                return status
        elif fault.kind == FaultKind.SHORT:
            report_at_most = _shortened(chunk)
        # PARTIAL_SUBMIT, REAP_ERROR: nothing is submitted in batches or collected here.
    raw = (ctypes.c_char * chunk.length).from_address(request.address + chunk.at)
    view = memoryview(raw).cast("B")
    last_end = -1
    while True:
        stop = report_at_most if report_at_most >= ALIGNMENT else chunk.length
        count = _call(op, chunk, view[chunk.moved : stop])
        if count < 0:
            return count
        end = min(chunk.moved + count, report_at_most)
        report_at_most = chunk.length
        stuck = end in (last_end, chunk.moved)
        chunk.moved = last_end = end
        if end == chunk.length:
            return 0
        if stuck:
            return -errno.ENODATA if op == Op.READ else -errno.EIO
        if end % ALIGNMENT and fcntl.fcntl(request.fd, fcntl.F_GETFL) & os.O_DIRECT:
            chunk.moved -= end % ALIGNMENT
        chunk.retries += 1


def _run_safely(op: Op, chunk: _Chunk) -> int:
    """`_run_chunk`; the thread survives everything, or whoever waits for its chunk waits for ever."""
    try:
        return _run_chunk(op, chunk)
    except MemoryError:
        return -errno.ENOMEM
    except Exception:
        logger.exception("a chunk failed in a way that was not foreseen")
        return -errno.EIO


class PathQueue:
    """One path: lists by operation and priority, and the workers. `_lock` guards every field."""

    def __init__(self, options: QueueOptions, faults: FaultPoint) -> None:
        self.options = options
        self.stats = EngineStats()
        self.latency = {op: LatencyCounter() for op in Op}
        self._faults = faults
        self._lock = threading.Lock()
        self._wake = {op: threading.Condition(self._lock) for op in Op}
        self._lists: dict[Op, tuple[deque[ThreadRequest], ...]] = {
            op: tuple(deque() for _ in Priority) for op in Op
        }
        self._in_flight = 0
        self._closing = False
        self._workers: list[threading.Thread] = []
        for op, depth in ((Op.READ, options.read_depth), (Op.WRITE, options.write_depth)):
            for _ in range(min(depth, _MAX_WORKERS)):
                worker = threading.Thread(target=self._main, args=(op,), name="tm-io", daemon=True)
                self._workers.append(worker)
                worker.start()

    def push(self, op: Op, priority: Priority, requests: Sequence[ThreadRequest]) -> None:
        with self._lock:
            if self._closing:
                raise checks.closed_error()
            self._lists[op][priority].extend(requests)
            self._wake[op].notify_all()

    def _cut(self, op: Op) -> _Chunk | None:
        """The next chunk of ``op``, or None. The caller holds the lock."""
        for waiting in self._lists[op]:
            if waiting:
                request = waiting[0]
                length = min(request.length - request.issued, self.options.chunk_bytes)
                chunk = _Chunk(request, request.issued, length, self._faults.next(op))
                request.issued += length
                request.outstanding += 1
                if request.issued == request.length:
                    waiting.popleft()
                self._in_flight += 1
                self.stats.max_in_flight = max(self.stats.max_in_flight, self._in_flight)
                return chunk
        return None

    def _settle(self, op: Op, chunk: _Chunk, status: int) -> None:
        request = chunk.request
        with self._lock:
            self._in_flight -= 1
            self._count(op, chunk)
            request.note(status, chunk.at, chunk.moved)
            if status < 0 and request.issued < request.length:  # the rest is not started
                request.issued = request.length
                for waiting in self._lists[op]:
                    if waiting and waiting[0] is request:
                        waiting.popleft()
            ended = request.outstanding == 0 and request.issued == request.length
        if ended:
            request.finish()

    def _count(self, op: Op, chunk: _Chunk) -> None:
        stats = self.stats
        stats.submit_calls += chunk.calls
        stats.retries += chunk.retries
        if op == Op.READ:
            stats.read_bytes += chunk.moved
            stats.read_chunks += 1
        else:
            stats.written_bytes += chunk.moved
            stats.written_chunks += 1

    def _main(self, op: Op) -> None:
        while True:
            with self._lock:
                chunk = self._cut(op)
                while chunk is None and not self._closing:
                    self._wake[op].wait()
                    chunk = self._cut(op)
            if chunk is None:
                return
            started = time.monotonic_ns()
            status = _run_safely(op, chunk)
            if not status:
                self.latency[op].count(time.monotonic_ns() - started)
            self._settle(op, chunk, status)
            del chunk  # the request must not outlive its caller's interest while this thread sleeps

    def cancel(self) -> None:
        ended = []
        with self._lock:
            for waiting in (one for lists in self._lists.values() for one in lists):
                for request in waiting:
                    request.cancel_rest()
                    if request.outstanding == 0:
                        ended.append(request)
                waiting.clear()
        for request in ended:
            request.finish()

    def stop(self) -> None:
        """Lets the workers drain and end; does not wait."""
        with self._lock:
            self._closing = True
            for condition in self._wake.values():
                condition.notify_all()

    def join(self) -> None:
        for worker in self._workers:
            if worker is not threading.current_thread():  # a finalizer may run in one of them
                worker.join()


class CopyQueue:
    """Memory to memory, first in first out, on one thread that starts with the first copy."""

    def __init__(self) -> None:
        self.copied_bytes = 0
        self._changed = threading.Condition()
        self._waiting: deque[ThreadRequest] = deque()
        self._closing = False
        self._worker: threading.Thread | None = None

    def push(self, request: ThreadRequest) -> None:
        with self._changed:
            if self._closing:
                raise checks.closed_error()
            if self._worker is None:
                self._worker = threading.Thread(target=self._main, name="tm-copy", daemon=True)
                self._worker.start()
            self._waiting.append(request)
            self._changed.notify()

    def _main(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                request = self._waiting.popleft()
            for at in range(0, request.length, _COPY_CHUNK_BYTES):
                count = min(_COPY_CHUNK_BYTES, request.length - at)
                ctypes.memmove(request.address + at, request.source + at, count)
                self.copied_bytes += count
            request.transferred = request.length
            request.finish()
            del request

    def stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self) -> None:
        if self._worker is not None:
            self._worker.join()
