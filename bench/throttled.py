"""Drives of a chosen speed: loop devices over files in memory, throttled by the block layer.

A `ThrottledDrive` is a file in a directory (best in memory, so that the limit is the throttle), a loop
device over it, an ext4 on that, mounted. The limits are of this process only: it is moved into a
control group (v1, blkio) of its own while `ThrottledDrives` is open. Needs root; `why_not` says what is
missing. `close` takes everything down again, whatever state it is in.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

BLKIO = Path("/sys/fs/cgroup/blkio")
MEMORY = Path("/dev/shm")
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")


def why_not(directory: Path = MEMORY) -> str:
    """Why no throttled drives can be made with files in ``directory``; empty if they can."""
    if os.geteuid() != 0:
        return "loop devices, mounting and control groups need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"missing: {', '.join(missing)}"
    if not (BLKIO / "blkio.throttle.write_bps_device").exists():
        return f"{BLKIO} has no throttles: control groups version 1 with blkio are needed"
    if not os.access(directory, os.W_OK):
        return f"{directory} cannot be written"
    try:
        with ThrottledDrives([1 << 30], nbytes=16 << 20, directory=directory):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"not permitted here: {str(detail).strip()}"


class ThrottledDrives:
    """``paths[i]`` is an empty directory on a drive of ``limits[i]`` bytes per second in each
    direction. Raises OSError or CalledProcessError where that is not permitted (see `why_not`)."""

    def __init__(
        self, limits: Sequence[int], *, nbytes: int = 1 << 30, directory: Path = MEMORY
    ) -> None:
        self.paths: list[Path] = []
        self._devices: list[str] = []
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            base = Path(tempfile.mkdtemp(prefix="tiermem-throttled-", dir=directory))
            stack.callback(shutil.rmtree, base)
            self._home = _own_group()
            self._group = self._home / base.name
            self._group.mkdir()
            stack.callback(self._leave)
            for number, limit in enumerate(limits):
                self._add(stack, base, number, nbytes)
                self._throttle(number, limit)
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
            self._stack = stack.pop_all()

    def _add(self, stack: contextlib.ExitStack, base: Path, number: int, nbytes: int) -> None:
        image, point = base / f"image{number}", base / f"drive{number}"
        with open(image, "wb") as file:
            file.truncate(nbytes)
        device = _run("losetup", "--find", "--show", str(image)).strip()
        stack.callback(_run, "losetup", "--detach", device)
        # Nothing of the file system is left to be written behind the measurement's back.
        lazy = "lazy_itable_init=0,lazy_journal_init=0"
        _run("mkfs.ext4", "-q", "-m", "0", "-E", lazy, device)
        point.mkdir()
        _run("mount", "-o", "noatime", device, str(point))
        stack.callback(_run, "umount", str(point))
        directory = point / "data"
        directory.mkdir()
        self.paths.append(directory)
        self._devices.append(device)

    def _throttle(self, number: int, limit: int) -> None:
        device = os.stat(self._devices[number]).st_rdev
        rule = f"{os.major(device)}:{os.minor(device)} {limit}"
        for direction in ("read", "write"):
            (self._group / f"blkio.throttle.{direction}_bps_device").write_text(rule)

    def _leave(self) -> None:
        """Back to where this process was; only then the group can go."""
        for process in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (self._home / "cgroup.procs").write_text(process)
        self._group.rmdir()

    def close(self) -> None:
        """Unmounts and removes everything. No file there may be open. Idempotent."""
        self._stack.close()

    def __enter__(self) -> ThrottledDrives:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own_group() -> Path:
    """The blkio group that this process is in, as far as it can be seen from here."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(",") and (BLKIO / path.lstrip("/")).is_dir():
            return BLKIO / path.lstrip("/")
    return BLKIO


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout
