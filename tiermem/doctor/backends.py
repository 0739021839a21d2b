"""Which I/O backends move bytes in a directory, and why the others do not."""

from __future__ import annotations

import os
from pathlib import Path

from tiermem.doctor.finding import Finding, Level, split_remedy
from tiermem.errors import ConfigError
from tiermem.io.backends import BACKENDS, WORKS, open_engine, probe_backends
from tiermem.io.base import Op, QueueOptions
from tiermem.io.buffers import aligned_buffer
from tiermem.types import ALIGNMENT

_LITTLE_ROOM = 1024  # asynchronous requests; a path takes 32 by default, other programs more
_REGISTERED_BYTES = 1 << 20


def check_backends(path: Path | None) -> list[Finding]:
    """One finding for each backend, tried in ``path`` (None: where temporary files go)."""
    where = "" if path is None else str(path)
    results = probe_backends(path)
    best = next((backend for backend in BACKENDS if results[backend] == WORKS), "")
    findings = [_backend(backend, results[backend], best, where) for backend in BACKENDS]
    if not best:
        text = "none works here"
        findings.append(Finding("backends", Level.PROBLEM, text, "see what each says above", where))
    elif best == "threads":
        findings.append(
            Finding(
                "backends",
                Level.PROBLEM,
                "only Python threads work: much slower, and they take processor time from training",
                "mend one of the others",
                where,
            )
        )
    return findings


def _backend(backend: str, result: str, best: str, where: str) -> Finding:
    if result == WORKS:
        text = "works; 'auto' takes it" if backend == best else "works"
        return Finding(backend, Level.OK, text, path=where)
    reason, remedy = split_remedy(result)
    if "native core" in result:
        reason, remedy = "needs the native core", "see native core"
    level = Level.PROBLEM if backend == "threads" else Level.NOTE
    return Finding(backend, level, f"does not work: {reason}", remedy, where)


def check_registration() -> list[Finding]:
    """Whether io_uring may register the arena, by a transfer in memory that was given to it; nothing
    where io_uring does not work."""
    topic = "io_uring memory"
    try:
        said = _register()
    except ConfigError:
        return []
    except OSError as error:
        return [Finding(topic, Level.NOTE, f"cannot be tried: {error}")]
    if not said.startswith("0 bytes"):
        return [Finding(topic, Level.OK, "can be registered")]
    reason, remedy = split_remedy(said.partition("; ")[2])
    text = f"cannot be registered, which takes processor time: {reason or said}"
    return [Finding(topic, Level.NOTE, text, remedy)]


def _register() -> str:
    fd = os.memfd_create("tiermem-doctor")
    try:
        os.truncate(fd, ALIGNMENT)
        engine = open_engine("io_uring")
        try:
            queue = engine.add_queue(QueueOptions(ALIGNMENT, 1, 1))
            with aligned_buffer(_REGISTERED_BYTES) as buffer:
                engine.register(buffer.address, buffer.nbytes)
                engine.submit(queue, Op.READ, fd, 0, buffer.address, ALIGNMENT).wait()
                said = engine.registration
                engine.unregister(buffer.address)
                return said
        finally:
            engine.close()
    finally:
        os.close(fd)


def check_requests() -> Finding:
    """How many asynchronous requests libaio has left on the whole machine."""
    topic = "aio requests"
    try:
        used = int(Path("/proc/sys/fs/aio-nr").read_text())
        limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    except (OSError, ValueError) as error:
        return Finding(topic, Level.NOTE, f"fs.aio-nr cannot be read: {error}", "mount /proc")
    text = f"fs.aio-nr {used} of fs.aio-max-nr {limit} in use"
    if limit - used >= _LITTLE_ROOM:
        return Finding(topic, Level.OK, text)
    remedy = f"sysctl fs.aio-max-nr={max(1 << 20, 2 * limit)}"
    return Finding(topic, Level.NOTE, f"{text}: libaio is refused, or will soon be", remedy)
