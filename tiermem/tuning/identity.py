"""Which drive a path lies on, in terms that survive a reboot as far as that costs nothing.

[Note: identity] Two directories of one file system are the same drive. A file system is known by its
own number (``f_fsid``: made of the UUID by ext4, btrfs and f2fs; xfs gives the number of its device),
its kind, and the models and sizes of the disks below it, so that a drive that was exchanged or
renumbered is not taken for the old one. Without such a number, what is mounted where must serve.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermem.benchmark.place import Site, look_at


@dataclass(frozen=True, slots=True)
class Identity:
    """See [Note: identity]. ``devices`` are (model, size in bytes)."""

    filesystem: str
    number: str
    devices: tuple[tuple[str, int], ...]

    def fields(self) -> dict[str, Any]:
        return {
            "filesystem": self.filesystem,
            "number": self.number,
            "devices": [{"model": model, "size_bytes": size} for model, size in self.devices],
        }

    @classmethod
    def of_fields(cls, fields: Any) -> Identity:
        """Raises KeyError, TypeError or ValueError for what `fields` did not make."""
        devices = [(str(each["model"]), int(each["size_bytes"])) for each in fields["devices"]]
        return cls(str(fields["filesystem"]), str(fields["number"]), tuple(devices))


def identify(path: Path) -> Identity:
    """Of an existing directory. Raises OSError."""
    return identity_of(look_at(path))


def identity_of(site: Site) -> Identity:
    number = os.statvfs(site.path).f_fsid
    mount = site.mount
    known = f"{number:016x}" if number else f"{mount.source} at {mount.mount_point}"
    return Identity(
        mount.filesystem, known, tuple((device.model, device.size_bytes) for device in site.devices)
    )
