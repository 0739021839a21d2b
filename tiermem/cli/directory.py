"""Where states go when no directory is named."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tiermem.errors import ConfigError
from tiermem.store.mounts import find_mount


def in_memory(path: Path) -> bool:
    """Whether files below ``path``, which need not exist yet, are memory: the budget would not know
    of it."""
    existing = next(place for place in (path, *path.resolve().parents) if place.exists())
    return find_mount(existing).in_memory


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
