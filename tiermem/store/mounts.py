"""What kind of filesystem a path is on, from /proc/self/mountinfo."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "gpfs", "ceph", "glusterfs"}
    | {"afs", "ocfs2", "gfs2", "9p", "virtiofs", "pvfs2", "orangefs", "wekafs"}
)


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount a path lies on."""

    mount_point: str
    filesystem: str
    source: str = ""
    """What is mounted: a block device, ``server:/directory``, or a name without meaning."""

    @property
    def in_memory(self) -> bool:
        return self.filesystem in _MEMORY

    @property
    def is_network(self) -> bool:
        """Whether other machines may see the same files (anything in user space counts)."""
        return self.filesystem in _NETWORK or self.filesystem.startswith("fuse")


def find_mount(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Mount:
    """The mount of an existing ``path``; filesystem ``unknown`` where /proc does not say."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path)
    best = Mount("/", "unknown")
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return best
    by_path = best
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = _unescape(fields[4])
        kind, source, *_ = [*after.split(), "", ""]
        mount = Mount(point, kind, _unescape(source))
        if not _is_below(real, point) or len(point) < len(by_path.mount_point):
            continue
        by_path = mount  # later lines lie over earlier ones with the same mount point
        if fields[2] == wanted:
            best = mount
    # On btrfs and some overlays st_dev is not in mountinfo: then the path alone decides.
    return best if best.filesystem != "unknown" else by_path


def _is_below(path: str, point: str) -> bool:
    return point == "/" or path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
