"""The interface of every I/O backend. Imports no torch.

An `Engine` owns queues. A *path queue* is one submission queue and one thread for one storage
path; the *copy queue* moves bytes between two places in memory, so that a record kept partly in
host memory is fetched from DRAM and drives at once. Requests may have any size: the backend cuts
them into chunks, keeps chunks of many requests in flight up to the queue's depth, and completes
each request by itself.

Addresses are plain integers. The caller promises that the memory stays valid until the request
has completed; a `Request` holds ``owner`` for that purpose and drops it on completion being
*observed* (``wait`` returned or ``done`` was True).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tiermem.io.latency import Latency


class Op(enum.IntEnum):
    READ = 0
    WRITE = 1


class Priority(enum.IntEnum):
    """DEMAND goes ahead of everything queued; BACKGROUND is prefetch and write-back."""

    DEMAND = 0
    BACKGROUND = 1


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """How one path queue submits. Sizes in bytes, depths in chunks.

    Equal depths let reads and writes share a drive evenly. 32 MiB in flight per direction kept a
    drive of 3 GB/s busy while other threads took all processors; with half of it, it idled now and
    then. More makes a demand read wait longer.
    """

    chunk_bytes: int = 2 << 20
    read_depth: int = 16
    write_depth: int = 16


class FaultKind(enum.IntEnum):
    """What an injected fault does to a chunk."""

    ERROR = 0  # the chunk completes with -errno
    SHORT = 1  # the chunk transfers only half of its bytes (at least one block less)
    SUBMIT_ERROR = 2  # the submission itself returns -errno (EINTR, EAGAIN)
    PARTIAL_SUBMIT = 3  # the kernel accepts only the first chunk of a batch
    REAP_ERROR = 4  # once it was handed over, the queue can no longer collect what has ended


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at an exact point, for tests: the ``nth`` chunk (from 0) of ``op``."""

    op: Op
    nth: int
    kind: FaultKind
    errno: int = 0
    repeat: int = 1  # how many chunks in a row are hit; SUBMIT_ERROR: attempts of the one chunk


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made. Bytes moved by completed chunks, per direction."""

    read_bytes: int = 0
    written_bytes: int = 0
    copied_bytes: int = 0
    read_chunks: int = 0
    written_chunks: int = 0
    submit_calls: int = 0
    retries: int = 0  # EINTR, EAGAIN, short transfers continued
    max_in_flight: int = 0
    by_queue: dict[int, tuple[int, int]] = field(default_factory=dict)  # queue: (read, written) bytes


class Request(Protocol):
    """One transfer. Its result must be read: ``wait`` raises `OSError` if it failed."""

    length: int

    def done(self) -> bool:
        """Whether it has completed (well or not). Never blocks."""

    def wait(self, timeout: float | None = None) -> None:
        """Blocks (without the GIL) until complete. Raises OSError(errno) on failure or
        TimeoutError; a short transfer that could not be continued is OSError(EIO) that says so.
        Calling it again gives the same result."""

    def failure(self) -> str:
        """Where and why it failed, without what it is; empty if it has not."""


Move = tuple[int, int, int, int]
"""What one transfer moves: descriptor, offset in the file, address, length in bytes."""


class Engine(Protocol):
    name: str
    """``libaio``, ``io_uring``, ``native_threads`` or ``threads``; what is really in use."""
    reason: str
    """Why this backend was chosen."""

    def add_queue(self, options: QueueOptions) -> int:
        """A new path queue; its number."""

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
    ) -> Request:
        """Starts a transfer and returns at once. With an O_DIRECT ``fd`` offset, address and
        length are multiples of ALIGNMENT."""

    def submit_many(
        self,
        queue: int,
        op: Op,
        moves: Sequence[Move],
        *,
        owner: object = None,
        priority: Priority = Priority.BACKGROUND,
    ) -> Sequence[Request]:
        """As `submit` for each of ``moves``, in their order, with one hand-over for all: what makes
        thousands of small transfers cheap. Starts all of them or raises and starts none. Every request
        holds ``owner``."""

    def copy(self, destination: int, source: int, length: int, *, owner: object = None) -> Request:
        """Starts a memory-to-memory copy on the copy queue and returns at once."""

    def register(self, address: int, length: int) -> None:
        """Says that transfers will use this memory, so that they can be made cheaper. Memory that
        transfers touch is pinned then, in pieces of up to 32 MiB. Never needed, and a backend
        without a use for it does nothing. The memory stays mapped until `unregister` or `close`."""

    def unregister(self, address: int) -> None:
        """Ends what `register` of this address began. No transfer may be in flight there."""

    @property
    def registration(self) -> str:
        """How much memory is registered, or why none."""

    def cancel(self, queue: int) -> None:
        """Ends all of a queue that the kernel has not got yet with ECANCELED; does not wait."""

    def inject(self, fault: Fault | None) -> None:
        """For tests: arms one fault (None disarms). Counting starts with this call."""

    def stats(self) -> EngineStats: ...

    def latency(self, queue: int, op: Op) -> Latency:
        """How long the chunks of one queue and operation that ended well took, since the queue was
        added: from submission to completion. Where threads move the chunks (``native_threads``,
        recorded when one is handed to them), waiting for a free thread counts."""

    def close(self) -> None:
        """Waits for everything in flight, stops the threads. Idempotent. Submitting afterwards
        raises StateError."""
