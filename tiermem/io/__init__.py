"""Asynchronous transfers between storage and memory. Imports no torch.

`open_engine` gives an `Engine`; `StorageFile` is a preallocated file to use it on.
"""

from __future__ import annotations

import logging
import os
import tempfile

from tiermem.errors import ConfigError
from tiermem.io.base import (
    Engine,
    EngineStats,
    Fault,
    FaultKind,
    Op,
    Priority,
    QueueOptions,
    Request,
)
from tiermem.io.buffers import AlignedBuffer, aligned_buffer
from tiermem.io.files import StorageFile
from tiermem.io.latency import Latency
from tiermem.io.threads import ThreadsEngine
from tiermem.types import ALIGNMENT

__all__ = [
    "BACKENDS",
    "AlignedBuffer",
    "Engine",
    "EngineStats",
    "Fault",
    "FaultKind",
    "Latency",
    "Op",
    "Priority",
    "QueueOptions",
    "Request",
    "StorageFile",
    "aligned_buffer",
    "open_engine",
    "probe_backends",
]

logger = logging.getLogger(__name__)

BACKENDS = ("io_uring", "libaio", "native_threads", "threads")
"""In order of preference."""

WORKS = "works"


def _make(backend: str) -> Engine:
    if backend == "threads":
        return ThreadsEngine()
    # Imported here: the native core is optional.
    from tiermem.io.native import NativeEngine

    return NativeEngine(backend)


def _round_trip(engine: Engine, directory: str | os.PathLike[str] | None) -> None:
    """Writes one block to a file without a name, reads it back; raises when that fails."""
    queue = engine.add_queue(QueueOptions(chunk_bytes=ALIGNMENT, read_depth=1, write_depth=1))
    with tempfile.TemporaryFile(dir=directory) as file, aligned_buffer(2 * ALIGNMENT) as buffer:
        buffer.fill(0x5A)
        second = buffer.address + ALIGNMENT
        engine.submit(queue, Op.WRITE, file.fileno(), 0, buffer.address, ALIGNMENT).wait()
        with buffer.view[ALIGNMENT:] as target:
            target[:] = bytes(ALIGNMENT)
            engine.submit(queue, Op.READ, file.fileno(), 0, second, ALIGNMENT).wait()
            if bytes(target) != b"\x5a" * ALIGNMENT:
                raise OSError("what was read back is not what was written")


def _words(error: OSError) -> str:
    """The message without the number."""
    where = f": {error.filename!r}" if error.filename is not None else ""
    return f"{error.strerror or error}{where}"


def _probe(backend: str, directory: str | os.PathLike[str] | None) -> str:
    try:
        engine = _make(backend)
    except ImportError as error:
        return f"the native core is not built ({error}); install gcc and reinstall tiermem"
    except OSError as error:
        return _words(error)
    try:
        _round_trip(engine, directory)
        return WORKS
    except OSError as error:
        return _words(error)
    finally:
        engine.close()


def probe_backends(directory: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """For each backend ``'works'`` or why not, by a real write and read in ``directory``
    (default: where temporary files go)."""
    return {backend: _probe(backend, directory) for backend in BACKENDS}


def open_engine(backend: str = "auto", directory: str | os.PathLike[str] | None = None) -> Engine:
    """The engine ``backend`` (``auto`` or one of `BACKENDS`); its ``reason`` says why.

    ``threads`` is pure Python and needs no compiler.

    ``auto`` takes the first of `BACKENDS` that really writes and reads in ``directory``. A backend
    asked for by name is not replaced: ConfigError says why it does not work.
    """
    if backend == "auto":
        return _open_auto(directory)
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; it must be one of auto, {', '.join(BACKENDS)}")
    try:
        return _make(backend)
    except (ImportError, OSError) as error:
        reason = _words(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"backend {backend} does not work: {reason}; backend 'auto' picks another"
        ) from error


def _open_auto(directory: str | os.PathLike[str] | None) -> Engine:
    refusals: list[str] = []
    for backend in BACKENDS:
        result = _probe(backend, directory)
        if result == WORKS:
            engine = _make(backend)
            engine.reason = "; ".join([*refusals, f"{backend}: a write and a read succeeded"])
            logger.info("I/O backend %s (%s)", backend, engine.reason)
            return engine
        refusals.append(f"{backend}: {result}")
    raise ConfigError(
        f"no I/O backend works in {directory or tempfile.gettempdir()}: {'; '.join(refusals)}. Remedy: "
        f"give a directory on a drive"
    )
