"""Which backend serves: named, or the first that really moves bytes here."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from typing import BinaryIO, cast

from tiermem.errors import ConfigError
from tiermem.io.base import Engine, Op, QueueOptions
from tiermem.io.buffers import aligned_buffer
from tiermem.io.threads import ThreadsEngine
from tiermem.types import ALIGNMENT

logger = logging.getLogger(__name__)

BACKENDS = ("io_uring", "libaio", "native_threads", "threads")
"""In order of preference."""

WORKS = "works"

Scratch = Callable[[], BinaryIO]
"""Opens a file without a name to try a backend on."""


def _make(backend: str) -> Engine:
    if backend == "threads":
        return ThreadsEngine()
    # Imported here: the native core is optional.
    from tiermem.io.native import NativeEngine

    return NativeEngine(backend)


def _on_disk(directory: str | os.PathLike[str] | None) -> Scratch:
    return lambda: cast(BinaryIO, tempfile.TemporaryFile(dir=directory))


def _in_memory() -> BinaryIO:
    return os.fdopen(os.memfd_create("tiermem-probe"), "w+b")


def _round_trip(engine: Engine, scratch: Scratch) -> None:
    """Writes one block to a file without a name, reads it back; raises when that fails."""
    queue = engine.add_queue(QueueOptions(chunk_bytes=ALIGNMENT, read_depth=1, write_depth=1))
    with scratch() as file, aligned_buffer(2 * ALIGNMENT) as buffer:
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


def _probe(backend: str, scratch: Scratch) -> str:
    try:
        engine = _make(backend)
    except ImportError as error:
        return f"the native core is not built ({error}); install gcc and reinstall tiermem"
    except OSError as error:
        return _words(error)
    try:
        _round_trip(engine, scratch)
        return WORKS
    except OSError as error:
        return _words(error)
    finally:
        engine.close()


def probe_backends(directory: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """For each backend ``'works'`` or why not, by a real write and read in ``directory``
    (default: where temporary files go)."""
    return {backend: _probe(backend, _on_disk(directory)) for backend in BACKENDS}


def open_engine(backend: str = "auto", directory: str | os.PathLike[str] | None = None) -> Engine:
    """The engine ``backend`` (``auto`` or one of `BACKENDS`); its ``reason`` says why.

    ``threads`` is pure Python and needs no compiler.

    ``auto`` takes the first of `BACKENDS` that really writes and reads in ``directory``. A backend
    asked for by name is not replaced: ConfigError says why it does not work.
    """
    if backend == "auto":
        return _open_auto(_on_disk(directory), os.fspath(directory or tempfile.gettempdir()))
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; it must be one of auto, {', '.join(BACKENDS)}")
    try:
        return _make(backend)
    except (ImportError, OSError) as error:
        reason = _words(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"backend {backend} does not work: {reason}; backend 'auto' picks another"
        ) from error


def open_engine_anywhere(backend: str) -> Engine:
    """As `open_engine`, but ``auto`` tries a file in memory: for files that may only be read."""
    return _open_auto(_in_memory, "memory") if backend == "auto" else open_engine(backend)


def _open_auto(scratch: Scratch, where: str) -> Engine:
    refusals: list[str] = []
    for backend in BACKENDS:
        result = _probe(backend, scratch)
        if result == WORKS:
            engine = _make(backend)
            engine.reason = "; ".join([*refusals, f"{backend}: a write and a read succeeded"])
            logger.info("I/O backend %s (%s)", backend, engine.reason)
            return engine
        refusals.append(f"{backend}: {result}")
    raise ConfigError(
        f"no I/O backend works in {where}: {'; '.join(refusals)}. Remedy: give a directory on a drive"
    )
