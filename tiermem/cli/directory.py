"""Where states go when no directory is named."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

from tiermem.errors import ConfigError

_IN_MEMORY = ("tmpfs", "ramfs", "rootfs")


def filesystem_of(path: Path) -> str:
    """The type of the filesystem that ``path`` lies on, such as ``ext4``; empty when unknown."""
    resolved = path.resolve()
    best, found = -1, ""
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), partition.fstype
    return found


def in_memory(path: Path) -> bool:
    """Whether files below ``path`` are memory, which the budget would not know of."""
    return filesystem_of(path) in _IN_MEMORY


def default_parent() -> Path:
    """What `default_directory` lies in; nothing is made."""
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    return next((path for path in candidates if path.is_dir() and not in_memory(path)), candidates[0])


def default_directory() -> Path:
    """A directory of this user's on a drive: below the temporary directory, else /var/tmp, else here.

    The runtime puts its own locked directory inside, and reclaims those of dead runs there; so the
    name is the same in every run.
    """
    directory = default_parent() / f"tiermem-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        owner = directory.stat().st_uid
    except OSError as error:
        raise ConfigError(
            f"cannot make {directory}: {error.strerror}; name a directory with --path"
        ) from error
    if owner != os.getuid():
        raise ConfigError(f"{directory} belongs to another user; name a directory with --path")
    return directory
