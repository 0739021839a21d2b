"""`AsyncFile`: an open file with an engine of its own, for arrays, tensors and other memory.

[Note: unaligned transfers] O_DIRECT wants file offsets, lengths and addresses aligned; callers have
arrays at any address, of any size. A transfer is cut at the first and the last multiple of
`EDGE_BYTES` in the file: the prefix and the suffix, each shorter than that, go through a second
descriptor without O_DIRECT, with the page cache as their bounce buffer, and the middle goes straight
between drive and memory (the rule of NVIDIA's KvikIO). The middle goes through the page cache, too,
where the address of its memory is not a multiple of what the drive asks for (often 512
bytes, 4 at many NVMe drives): then no byte of it is aligned.

The page cache and not a buffer of ours, because a block that is written in part must be read, merged
and written back as one step: ours could lose the update of another transfer in the same block, and
would have to round up the length of the file. Prefix, middle and suffix of all transfers share no
page of the cache, since they are cut at multiples of the page size, and the kernel keeps a direct
transfer and what it has cached of the same range consistent. Read-ahead is switched off on the second
descriptor: it would cache ranges that direct writes are changing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from tiermem.errors import ConfigError, IOContext, StateError, TierIOError
from tiermem.io import checks
from tiermem.io.alignment import EDGE_BYTES, direct_alignment
from tiermem.io.backends import open_engine_anywhere
from tiermem.io.base import Engine, Op, Priority, QueueOptions, Request
from tiermem.io.files import StorageFile, reserve
from tiermem.io.memory import Span, span_of
from tiermem.io.transfer import Transfer
from tiermem.types import ALIGNMENT

_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


@dataclass(frozen=True, slots=True)
class _Descriptors:
    """``direct`` is None where O_DIRECT does not work or was not asked for."""

    cached: int
    direct: StorageFile | None
    memory_alignment: int  # bytes, of addresses in direct transfers

    def close(self) -> None:
        if self.direct is not None:
            self.direct.close()
        os.close(self.cached)


class AsyncFile:
    """A file whose reads and writes run beside the caller. Made by `open_file`.

    All methods may be called from any thread. In a forked child only `close` may be called.
    """

    def __init__(
        self, path: str, descriptors: _Descriptors, engine: Engine, options: QueueOptions
    ) -> None:
        self.path = path
        self.engine = engine
        """Its own engine: ``engine.name`` and ``engine.reason`` say which backend, and why."""
        self._descriptors = descriptors
        self._queue = engine.add_queue(options)
        self._writable = _access_mode(descriptors.cached) != os.O_RDONLY
        self._pid = os.getpid()
        self._state = threading.Lock()  # of _closed, _writes, and against submitting after close
        self._closing = threading.Lock()  # held while closing: others return when it is done
        self._closed = False
        self._released = False
        self._writes: weakref.WeakSet[Transfer] = weakref.WeakSet()  # not flushed yet
        self._lost: deque[TierIOError] = deque()  # of writes that nobody waited for; without the lock

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read and write" if self._writable else "read only"
        return f"<AsyncFile: {self.path}, {state}, {self.engine.name}>"

    @property
    def direct(self) -> bool:
        """Whether aligned transfers bypass the page cache."""
        return self._descriptors.direct is not None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def nbytes(self) -> int:
        """The length of the file now."""
        self._check_process()
        with self._state:
            self._check()
            return os.fstat(self._descriptors.cached).st_size

    def read_into(
        self, memory: Any, offset: int, *, priority: Priority = Priority.BACKGROUND
    ) -> Transfer:
        """Starts reading ``memory``'s number of bytes at ``offset`` into it; returns at once.

        ``memory`` is a numpy array, a torch tensor in host memory, or anything with the buffer
        protocol or DLPack; contiguous and writable. Raises ValueError or TypeError if it is not,
        StateError if the file is closed. Everything else is raised by the transfer's ``wait``.
        """
        return self._start(Op.READ, span_of(memory, writable=True), offset, priority)

    def write_from(
        self, memory: Any, offset: int, *, priority: Priority = Priority.BACKGROUND
    ) -> Transfer:
        """Starts writing ``memory`` at ``offset``; returns at once. It must not change meanwhile.

        The file grows as needed. Raises as `read_into`; ConfigError if the file is open for reading.
        """
        if not self._writable:
            raise ConfigError(f"{self.path} is open for reading only; open it with mode 'r+' or 'w'")
        return self._start(Op.WRITE, span_of(memory, writable=False), offset, priority)

    def flush(self) -> None:
        """Waits for the writes that were started and makes them durable (``fdatasync``).

        Raises TierIOError if one of them failed (also one whose transfer was dropped), after all of
        them have ended, or if the drive refuses.
        """
        self._check_process()
        with self._state:
            self._check()
            writes, self._writes = list(self._writes), weakref.WeakSet()
            fd = os.dup(self._descriptors.cached)  # another thread may close the file meanwhile
        try:
            self._settle(writes)
            os.fdatasync(fd)
        except TierIOError:
            raise
        except OSError as error:
            context = IOContext("flush", self.path, 0, 0)
            raise TierIOError(error.errno or errno.EIO, context) from error
        finally:
            os.close(fd)

    def _settle(self, writes: list[Transfer]) -> None:
        """Waits for all of ``writes``; raises the first failure since the last flush."""
        failures: list[TierIOError] = []
        try:
            for transfer in writes:
                try:
                    transfer.wait()
                except TierIOError as error:
                    failures.append(error)
        except BaseException:  # Ctrl-C: they are still to be flushed
            with self._state:
                self._writes.update(writes)
            raise
        lost = [self._lost.popleft() for _ in range(len(self._lost))]
        if lost or failures:
            raise (lost + failures)[0]

    def close(self) -> None:
        """Cancels what has not begun (its ``wait`` raises ECANCELED), waits for what has. Idempotent.

        Does not flush. In a forked child it only closes the child's descriptors.
        """
        if self._pid != os.getpid():
            self._release()  # without the locks, which may have been held when this child forked
            return
        with self._closing:
            with self._state:
                self._closed = True
            if not self._released:
                with contextlib.suppress(StateError):  # its owner may have closed the engine
                    self.engine.cancel(self._queue)
                self._release()

    def _release(self) -> None:
        self._closed = True
        if not self._released:
            self._released = True
            self.engine.close()
            self._descriptors.close()

    def _check_process(self) -> None:
        """Before any lock, which may have been held when this child forked."""
        if self._pid != os.getpid():
            raise checks.forked_error(self._pid)

    def _check(self) -> None:
        if self._closed:
            raise StateError(f"{self.path} is closed; open it again with tiermem.io.open_file()")

    def _start(self, op: Op, span: Span, offset: int, priority: Priority) -> Transfer:
        self._check_process()
        offset = checks.check_offset(offset, span.nbytes)
        context = IOContext("read" if op == Op.READ else "write", self.path, offset, span.nbytes)
        owner = (span.owner, self)  # the descriptors must live as long as the memory
        parts: list[Request] = []
        with self._state:
            self._check()
            for fd, begin, end in self._cut(span, offset):
                address = span.address + begin - offset
                parts.append(
                    self.engine.submit(
                        self._queue, op, fd, begin, address, end - begin, owner=owner, priority=priority
                    )
                )
            if op == Op.READ:
                return Transfer(context, parts)
            transfer = Transfer(context, parts, lost=self._lost)
            self._writes.add(transfer)
        return transfer

    def _cut(self, span: Span, offset: int) -> list[tuple[int, int, int]]:
        """Descriptor, begin and end in the file of each part: see [Note: unaligned transfers]."""
        end = offset + span.nbytes
        cached, direct = self._descriptors.cached, self._descriptors.direct
        low, high = -(-offset // EDGE_BYTES) * EDGE_BYTES, end // EDGE_BYTES * EDGE_BYTES
        misaligned = (span.address + low - offset) % self._descriptors.memory_alignment
        if direct is None or low >= high or misaligned:
            return [(cached, offset, end)]
        parts = [(cached, offset, low), (direct.fd, low, high), (cached, high, end)]
        return [part for part in parts if part[1] < part[2]]

    def __enter__(self) -> AsyncFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_released", True) and self._pid == os.getpid():
            warnings.warn(f"{self.path} was not closed", ResourceWarning, source=self, stacklevel=2)
            # Nothing is in flight: transfers hold this object. As files do, rather than leak.
            self._release()


def _access_mode(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE


def open_file(
    path: str | os.PathLike[str],
    mode: str = "r",
    *,
    nbytes: int = 0,
    direct: bool = True,
    backend: str = "auto",
    options: QueueOptions | None = None,
) -> AsyncFile:
    """Opens ``path`` for asynchronous reads and writes at offsets.

    ``mode`` is ``r`` (read), ``r+`` (read and write), ``w`` (the same, of a new or emptied file) or
    ``x`` (of a new file); those that write reserve ``nbytes`` on the drive. ``direct`` bypasses the
    page cache where the file system can. ``backend`` is ``auto`` or one of `BACKENDS`; ``options``
    says how large chunks and how deep queues are.

    Each file has an engine of its own, which is one or several threads: meant for a few large files.
    Raises TierIOError (ENOENT, EACCES, ENOSPC, ...) or ConfigError.
    """
    name = os.fspath(path)
    if mode not in _FLAGS:
        raise ConfigError(f"mode is {mode!r}; it must be one of {', '.join(_FLAGS)}")
    if not 0 <= nbytes <= (0 if mode == "r" else checks.MAX_OFFSET):
        raise ConfigError(
            f"nbytes is {nbytes} in mode {mode!r}; it must be 0 to read, else 0 to {checks.MAX_OFFSET}"
        )
    engine = open_engine_anywhere(backend)
    try:
        descriptors = _open_descriptors(name, mode, nbytes, direct)
        try:
            return AsyncFile(name, descriptors, engine, options or QueueOptions())
        except BaseException:
            descriptors.close()
            raise
    except BaseException:
        engine.close()
        raise


def _open_descriptors(name: str, mode: str, nbytes: int, direct: bool) -> _Descriptors:
    context = IOContext("open", name, 0, 0)
    try:
        cached = os.open(name, _FLAGS[mode] | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise TierIOError(error.errno or errno.EIO, context) from error
    try:
        if not stat.S_ISREG(os.fstat(cached).st_mode):
            raise TierIOError(errno.EINVAL, context, "it is not a regular file")
        if os.fstat(cached).st_size < nbytes:
            reserve(cached, name, nbytes)
        other = StorageFile.open(name, writable=mode != "r") if direct else None
        if other is None or not other.direct:
            if other is not None:
                other.close()
            return _Descriptors(cached, None, 1)
        if not os.path.samestat(os.fstat(cached), os.fstat(other.fd)):
            other.close()
            raise TierIOError(errno.ESTALE, context, "somebody replaced the file meanwhile")
        os.posix_fadvise(cached, 0, 0, os.POSIX_FADV_RANDOM)
        known = direct_alignment(other.fd)
        return _Descriptors(cached, other, known.memory if known and known.memory else ALIGNMENT)
    except BaseException:
        os.close(cached)
        raise
