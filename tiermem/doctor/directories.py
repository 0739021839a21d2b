"""Directories that are to hold a run's files: what they lie on and whether it serves."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

from tiermem.benchmark.device import find_devices
from tiermem.doctor.finding import Finding, Level
from tiermem.errors import ConfigError
from tiermem.io.alignment import direct_alignment
from tiermem.io.files import free_bytes
from tiermem.store.mounts import Mount, find_mount
from tiermem.store.rundir import check_paths
from tiermem.types import ALIGNMENT, format_bytes

_LITTLE_ROOM = 1 << 30


def check_directory(path: Path) -> list[Finding]:
    """Whether ``path`` can be used, its file system, O_DIRECT, locks. A file is made and removed."""
    where = str(path)
    try:
        check_paths([path])
    except ConfigError as error:
        text, _, remedy = str(error).partition("; ")
        return [Finding("directory", Level.PROBLEM, text, remedy, where)]
    try:
        return [_filesystem(path, where), _direct(path, where), _locks(path, where)]
    except OSError as error:
        remedy = "free space, or choose another directory"
        text = f"no file can be made there: {error.strerror or error}"
        return [Finding("directory", Level.PROBLEM, text, remedy, where)]


def _filesystem(path: Path, where: str) -> Finding:
    mount, free = find_mount(path), free_bytes(path)
    drives = find_devices(path, mount)
    rotating = any(drive.rotational for drive in drives)
    text = f"{mount.filesystem} at {mount.mount_point}, {format_bytes(free)} free"
    if drives:
        text += f", drive {', '.join(drive.name for drive in drives)}{', rotating' if rotating else ''}"
    level, more, remedy = _judge(mount, free, rotating)
    return Finding("directory", level, text + more, remedy, where)


def _judge(mount: Mount, free: int, rotating: bool) -> tuple[Level, str, str]:
    """Level, what it means, remedy."""
    if mount.in_memory:
        meaning = ": this is memory, and what is kept there takes it outside of the budget"
        return Level.PROBLEM, meaning, "give a directory on a drive"
    if mount.is_network:
        meaning = ": a network or user-space file system has a fraction of a drive's speed"
        return Level.PROBLEM, meaning, "give a directory on a local drive"
    if free < _LITTLE_ROOM:
        meaning = ": a run keeps 12 bytes of states per parameter there"
        return Level.NOTE, meaning, "free space, or give another directory"
    if rotating:
        meaning = " (virtual drives often say so wrongly)"
        return Level.NOTE, meaning, "if it is a hard disk, give a directory on NVMe"
    return Level.OK, "", ""


def _direct(path: Path, where: str) -> Finding:
    """Whether O_DIRECT really moves a block, and what alignment it takes."""
    fd, name = tempfile.mkstemp(prefix="tiermem-doctor-", dir=path)
    try:
        os.close(fd)
        error = _try_direct(name)
        if error is not None:
            return Finding(
                "O_DIRECT",
                Level.PROBLEM,
                f"does not work ({error}): transfers go through the page cache, at about half the "
                "speed, and fill memory outside of the budget",
                "give a directory on ext4, XFS or btrfs on a drive",
                where,
            )
        fd = os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            known = direct_alignment(fd)
        finally:
            os.close(fd)
    finally:
        os.unlink(name)
    aligned = f" (memory at {known.memory}, offsets at {known.offset} bytes)" if known else ""
    return Finding("O_DIRECT", Level.OK, f"works{aligned}", path=where)


def _try_direct(name: str) -> str | None:
    """None, or why a block cannot be written and read. Raises OSError for other troubles (ENOSPC)."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror
    try:
        with mmap.mmap(-1, ALIGNMENT) as block:
            os.pwritev(fd, [block], 0)
            os.preadv(fd, [block], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return error.strerror
    finally:
        os.close(fd)
    return None


def _locks(path: Path, where: str) -> Finding:
    """Whether directories can be locked: else files of dead runs stay."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # a run holds it: it works
    except OSError as error:
        text = f"do not work ({error.strerror}): files of runs that were killed stay"
        return Finding("locks", Level.NOTE, text, "remove tiermem-run-* of dead runs by hand", where)
    finally:
        os.close(fd)
    return Finding("locks", Level.OK, "work", path=where)
