"""One path of a benchmark: its run directory, its file, and what is known about where it lies."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermem.benchmark.device import Device, Link, find_devices
from tiermem.errors import ConfigError
from tiermem.io import StorageFile
from tiermem.io.files import free_bytes
from tiermem.store.mounts import Mount, find_mount
from tiermem.store.rundir import RunDirectory, check_paths
from tiermem.types import format_bytes

if TYPE_CHECKING:
    from tiermem.benchmark.pattern import Pattern

_FILE = "gen0.bin"  # a name that reclaiming a dead run's directory knows


@dataclass(frozen=True, slots=True)
class Site:
    """What a path lies on. ``free_bytes``: before the benchmark's file was made."""

    path: Path
    mount: Mount
    devices: tuple[Device, ...]
    free_bytes: int
    st_dev: int

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(device.link for device in self.devices if device.link is not None)

    def fields(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "path": str(self.path),
            "filesystem": self.mount.filesystem,
            "mount_point": self.mount.mount_point,
            "free_bytes": self.free_bytes,
            "devices": [_device_fields(device) for device in self.devices],
        }


def _device_fields(device: Device) -> dict[str, Any]:
    link = device.link
    return {
        "name": device.name,
        "model": device.model,
        "size_bytes": device.size_bytes,
        "rotational": device.rotational,
        "pcie": None
        if link is None
        else {
            "address": link.address,
            "gt_per_s": link.speed,
            "lanes": link.width,
            "gb_per_s": round(link.gb_per_s, 3),
            "max_gt_per_s": link.max_speed,
            "max_lanes": link.max_width,
            "max_gb_per_s": round(link.max_gb_per_s, 3),
        },
    }


def look_at(path: Path) -> Site:
    """What ``path``, an existing directory, lies on."""
    mount = find_mount(path)
    return Site(
        path=path,
        mount=mount,
        devices=find_devices(path, mount),
        free_bytes=free_bytes(path),
        st_dev=os.stat(path).st_dev,
    )


class Place:
    """A run directory with one preallocated file in it. `close` removes both."""

    def __init__(self, directory: RunDirectory, site: Site, nbytes: int, direct: bool) -> None:
        self.site = site
        self.reclaimed = directory.reclaimed
        self.pattern: Pattern | None = None
        self.file = StorageFile.create(directory.path / _FILE, nbytes, direct=direct)

    @property
    def is_sparse(self) -> bool:
        """Whether fewer blocks are allocated than the file is long: holes, or compression."""
        return os.fstat(self.file.fd).st_blocks * 512 < self.file.nbytes * 0.99

    def sync(self) -> None:
        """Everything that was written through the page cache is on the device."""
        os.fdatasync(self.file.fd)

    def drop_cache(self) -> None:
        """Clean pages of this file leave the page cache, as far as the system follows the advice."""
        self.sync()
        os.posix_fadvise(self.file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def open_places(
    stack: contextlib.ExitStack, paths: Sequence[Path], nbytes: int, direct: bool
) -> list[Place]:
    """A place in each path; closing ``stack`` removes them. ConfigError where one cannot be used."""
    check_paths(paths)
    directories = []
    for path in paths:
        try:
            directory = RunDirectory(path, say_filesystem=False)
        except PermissionError as error:
            raise ConfigError(f"path {str(path)!r} cannot be used: {error.strerror}") from error
        directories.append(stack.enter_context(directory))
    sites = [look_at(path) for path in paths]
    _check_room(sites, nbytes)
    places = []
    for directory, site in zip(directories, sites, strict=True):
        place = Place(directory, site, nbytes, direct)
        stack.callback(place.file.close)
        places.append(place)
    return places


def _check_room(sites: Sequence[Site], nbytes: int) -> None:
    problems = []
    for device in dict.fromkeys(site.st_dev for site in sites):
        here = [site for site in sites if site.st_dev == device]
        needed, free = nbytes * len(here), min(site.free_bytes for site in here)
        if needed > free:
            names = ", ".join(repr(str(site.path)) for site in here)
            problems.append(
                f"{names}: {os.strerror(errno.ENOSPC)}: {needed} bytes ({format_bytes(needed)}) are "
                f"needed and {free} ({format_bytes(free)}) are free; free some, give another path or a "
                "smaller --size"
            )
    if problems:
        raise ConfigError("; ".join(problems))
