"""The native engine, over io_uring, Linux AIO or C threads. The GIL is never held for a transfer."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import tiermem._native as _native
from tiermem.io import checks
from tiermem.io.base import EngineStats, Fault, Move, Op, Priority, QueueOptions
from tiermem.io.latency import Latency
from tiermem.io.refusals import explain, explain_memory
from tiermem.io.request import Outcome, PendingRequest
from tiermem.types import format_bytes

ffi: Any = _native.ffi
lib: Any = _native.lib

_WAIT_SLICE_SECONDS = 0.5  # a wait without end comes back this often, so that Ctrl-C works
# Why one submit may be refused; any other error is a queue's whose backend has failed.
_REFUSALS_OF_ONE = (-errno.EINVAL, -errno.ENOMEM, -errno.ESHUTDOWN, -errno.ECHILD)
_NO_FAULT = (0, lib.TM_FAULT_ERROR, 0, 0, 0)


BACKENDS = {
    "libaio": lib.TM_BACKEND_LIBAIO,
    "io_uring": lib.TM_BACKEND_IO_URING,
    "native_threads": lib.TM_BACKEND_THREADS,
}


class NativeRequest(PendingRequest):
    """A transfer of the native engine."""

    def __init__(
        self, handle: Any, operation: str, offset: int, length: int, owner: object, pid: int
    ) -> None:
        super().__init__(operation, offset, length, owner)
        # tm_request_free waits, should the last reference go while the kernel still writes.
        # Not released earlier: another thread may be inside a wait on it.
        self._handle = ffi.gc(handle, lib.tm_request_free)
        self._pid = pid

    def _await(self, timeout: float | None) -> Outcome | None:
        code = lib.tm_request_wait(self._handle, 0)
        if timeout == 0 and code == -errno.ETIMEDOUT:
            return None  # the common question, once per visit of a caller with work of its own
        deadline = None if timeout is None else time.monotonic() + timeout
        while code == -errno.ETIMEDOUT:
            left = _WAIT_SLICE_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            code = lib.tm_request_wait(self._handle, int(min(left, _WAIT_SLICE_SECONDS) * 1e9))
        if code == -errno.ECHILD:
            raise checks.forked_error(self._pid)
        result = ffi.new("tm_result *")
        lib.tm_request_result(self._handle, result)
        return Outcome(result.status, result.failed_at, result.transferred)


class NativeEngine:
    """`tiermem.io.base.Engine` on the native core; one C thread per path queue.

    ``backend`` is one of `BACKENDS`. Raises OSError with the remedy where it does not work.
    """

    def __init__(self, backend: str) -> None:
        self.name = backend
        self.reason = "asked for"
        self._unregistered: str | None = "no memory was given"  # why, or None
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of _closed and _num_queues
        self._closed = False
        self._num_queues = 0
        out = ffi.new("tm_engine **")
        code = lib.tm_engine_create(BACKENDS[backend], out)
        if code:
            raise OSError(-code, explain(backend, -code, 2))
        self._handle = ffi.gc(out[0], lib.tm_engine_free)

    def _check(self, code: int, action: str) -> None:
        if code == 0:
            return
        if code == -errno.ESHUTDOWN:
            raise checks.closed_error()
        if code == -errno.ECHILD:
            raise checks.forked_error(self._pid)
        raise OSError(-code, f"{action} failed: {os.strerror(-code)}")

    def _check_refusal(self, code: int, operation: str) -> None:
        if code in _REFUSALS_OF_ONE:
            self._check(code, f"submitting a {operation}")
        raise OSError(
            -code,
            f"{self.name} failed with {os.strerror(-code)!r} and this queue takes no more transfers; "
            "close the engine and open another",
        )

    def add_queue(self, options: QueueOptions) -> int:
        """A new path queue; its number. OSError, with the remedy, where the system refuses it."""
        checks.check_options(options)
        native = ffi.new(
            "tm_queue_options *", (options.chunk_bytes, options.read_depth, options.write_depth)
        )
        number = ffi.new("uint32_t *")
        code = lib.tm_engine_add_queue(self._handle, native, number)
        if code < 0 and code not in (-errno.ESHUTDOWN, -errno.ECHILD):
            raise OSError(-code, explain(self.name, -code, options.read_depth + options.write_depth))
        self._check(code, "adding a queue")
        with self._lock:
            self._num_queues = max(self._num_queues, int(number[0]) + 1)
        return int(number[0])

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
    ) -> NativeRequest:
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
    ) -> list[NativeRequest]:
        """Starts many transfers with one call into C; all of them or none."""
        for move in moves:
            checks.check_transfer(*move)
        if not 0 <= queue < self._num_queues:
            raise ValueError(f"queue is {queue}; there are {self._num_queues}")
        terms, cast = (int(op), int(priority)), ffi.cast
        ios = ffi.new(
            "tm_io[]",
            [
                (*terms, fd, offset, cast("void *", address), length)
                for fd, offset, address, length in moves
            ],
        )
        out = ffi.new("tm_request *[]", len(moves))
        operation = "read" if op == Op.READ else "write"
        code = lib.tm_engine_submit(self._handle, queue, len(moves), ios, out)
        if code:
            self._check_refusal(code, operation)
        return [
            NativeRequest(handle, operation, offset, length, owner, self._pid)
            for handle, (_, offset, _, length) in zip(out, moves, strict=True)
        ]

    def copy(
        self, destination: int, source: int, length: int, *, owner: object = None
    ) -> NativeRequest:
        """Starts a memory-to-memory copy (no overlap) and returns at once."""
        checks.check_transfer(0, 0, min(destination, source), length)
        out = ffi.new("tm_request **")
        code = lib.tm_engine_copy(
            self._handle, ffi.cast("void *", destination), ffi.cast("void *", source), length, out
        )
        self._check(code, "submitting a copy")
        return NativeRequest(out[0], "copy", 0, length, owner, self._pid)

    def cancel(self, queue: int) -> None:
        """Ends all of a queue that the kernel has not got yet with ECANCELED; does not wait."""
        self._check(lib.tm_engine_cancel(self._handle, queue), "cancelling")

    def register(self, address: int, length: int) -> None:
        """Lets transfers inside of this memory go cheaper where the backend and the kernel can; see
        `registration`. Raises OSError for memory that overlaps what is registered."""
        code = lib.tm_engine_register(self._handle, ffi.cast("void *", address), length)
        if code in (-errno.EOPNOTSUPP, -errno.ENOSPC):
            self._unregistered = explain_memory(self.name, -code)
            return
        self._check(code, f"registering {length} bytes of memory")
        self._unregistered = None

    def unregister(self, address: int) -> None:
        """Ends what `register` of this address began; to be called before the memory is unmapped."""
        code = lib.tm_engine_unregister(self._handle, ffi.cast("void *", address))
        if code != -errno.ENOENT:  # register() may have done nothing
            self._check(code, "unregistering memory")

    @property
    def registration(self) -> str:
        """How much memory is registered and how many chunks used it, or why none."""
        if self._unregistered is not None:
            return self._unregistered
        native = ffi.new("tm_memory_stats *")
        self._check(lib.tm_engine_memory_stats(self._handle, native), "reading what is registered")
        size = f"{native.bytes} bytes ({format_bytes(native.bytes)})"
        text = f"{size} registered, used by {native.chunks} chunks"
        return f"{text}; {explain_memory(self.name, -native.refusal)}" if native.refusal else text

    def inject(self, fault: Fault | None) -> None:
        """Arms one fault, or disarms with None; counting starts anew."""
        if self._closed:
            raise checks.closed_error()
        values = _NO_FAULT
        if fault is not None:
            values = (int(fault.op), int(fault.kind), fault.errno, fault.nth, fault.repeat)
        self._check(lib.tm_engine_inject(self._handle, ffi.new("tm_fault *", values)), "arming a fault")

    def stats(self) -> EngineStats:
        native = ffi.new("tm_engine_stats *")
        lib.tm_engine_get_stats(self._handle, native)
        total = EngineStats(
            read_bytes=native.read_bytes,
            written_bytes=native.written_bytes,
            copied_bytes=native.copied_bytes,
            read_chunks=native.read_chunks,
            written_chunks=native.written_chunks,
            submit_calls=native.submit_calls,
            retries=native.retries,
            max_in_flight=native.max_in_flight,
        )
        for queue in range(self._num_queues):
            lib.tm_engine_queue_stats(self._handle, queue, native)
            total.by_queue[queue] = (native.read_bytes, native.written_bytes)
        return total

    def latency(self, queue: int, op: Op) -> Latency:
        """How long the chunks of one queue and operation took, as recorded by the queue's thread."""
        if not 0 <= queue < self._num_queues:
            raise ValueError(f"queue is {queue}; there are {self._num_queues}")
        native = ffi.new("tm_latency *")
        self._check(lib.tm_engine_latency(self._handle, queue, int(op), native), "reading latencies")
        return Latency(native.sum_ns, tuple(native.buckets))

    def close(self) -> None:
        """Drains, joins the threads and gives their descriptors back. Idempotent."""
        if self._pid != os.getpid():
            self._closed = True  # a forked child has no threads to join, and the lock may be held
            return
        with self._lock:  # held throughout: a second caller returns when all is drained, too
            if not self._closed:
                self._closed = True
                lib.tm_engine_close(self._handle)

    def __enter__(self) -> NativeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._pid == os.getpid():
            warnings.warn("an I/O engine was not closed", ResourceWarning, source=self, stacklevel=2)
