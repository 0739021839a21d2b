"""`RunDirectory`: a directory that belongs to one run and goes with it.

[Note: run directories] A run makes ``tiermem-run-<host>-<pid>-<random>`` below the user's path, with
a marker file in it that it holds an flock on until it ends. The kernel drops the lock however the
process ends, so a run is alive exactly if its marker is locked; process ids, which are reused, are for
people only. Making a directory and reclaiming dead ones both happen under an flock on the user's path
itself (a lock on a directory leaves no file behind): a starter can therefore never see another's
directory between its mkdir and its lock. Where the filesystem cannot lock, nothing is reclaimed.

Reclaiming trusts nothing: everything goes through directory descriptors opened with O_NOFOLLOW, the
directory and marker must be ours (name, user, contents of the marker), and only regular files with
names that we give are unlinked; what else lies there stays, and so does the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import stat
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiermem.errors import ConfigError, IOContext, TierIOError
from tiermem.store.mounts import find_mount

logger = logging.getLogger(__name__)

_MARKER = "run.lock"
_MAGIC = "tiermem run directory"
_NAME = re.compile(r"tiermem-run-(?P<host>[A-Za-z0-9._]+)-(?P<pid>\d+)-[0-9a-f]{8}")
_OURS = re.compile(r"gen\d+\.bin")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL_OR_FAULTY = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_MARKER_LIMIT = 4096  # bytes read of a marker


def check_paths(paths: Sequence[Path]) -> None:
    """Raises one `ConfigError` that lists every path that cannot hold a run's files."""
    problems = [problem for path in paths if (problem := _problem(path))]
    if not problems:
        seen: dict[tuple[int, int], Path] = {}
        for path in paths:
            status = os.stat(path)
            other = seen.setdefault((status.st_dev, status.st_ino), path)
            if other is not path:
                problems.append(
                    f"path {str(path)!r} is the same directory as {str(other)!r}; give each drive once"
                )
    if problems:
        raise ConfigError("; ".join(problems))


class RunDirectory:
    """Makes this run's directory below ``path`` and reclaims those of dead runs there.

    Raises `ConfigError` if ``path`` cannot be used and `TierIOError` if the filesystem is full.
    A forked child that still has the object can only let go of it: `close` then deletes nothing. As
    long as it has not, the directory of a parent that was killed counts as alive. A path in memory or
    on a network is logged as a warning, unless ``say_filesystem`` is False.
    """

    def __init__(self, path: Path, *, say_filesystem: bool = True) -> None:
        self.parent = Path(path)
        check_paths([self.parent])
        if say_filesystem:
            self._warn_of_filesystem()
        self._pid = os.getpid()
        self._parent_fd: int | None = os.open(self.parent, _DIRECTORY & ~os.O_NOFOLLOW)
        self._lock_fd: int | None = None
        self._fd: int | None = None
        self.reclaimed: tuple[str, ...] = ()
        """Names of the directories of dead runs that were deleted."""
        try:
            with _locked(self._parent_fd) as locked:
                if locked:
                    self.reclaimed = reclaim(self.parent, self._parent_fd)
                else:
                    logger.warning("%s cannot be locked: files of dead runs there stay", self.parent)
                self.name = self._create(self._parent_fd)
        except OSError as error:
            os.close(self._parent_fd)
            self._parent_fd = None
            if isinstance(error, TierIOError):
                raise
            if error.errno not in _FULL_OR_FAULTY:
                raise ConfigError(
                    f"path {str(self.parent)!r} cannot hold a run's files: making a directory there "
                    f"failed ({error.strerror}); give a directory on the drive to use"
                ) from error
            context = IOContext("making a run directory", str(self.parent), 0, 0)
            raise TierIOError(
                error.errno or errno.EIO, context, "free space or choose another path"
            ) from error

    @property
    def path(self) -> Path:
        return self.parent / self.name

    def close(self) -> None:
        """Deletes the files of this run and the directory. Idempotent.

        Closing a forked copy must not unlock (the lock belongs to the open file, which parent and
        child share), only close its descriptors.
        """
        if self._parent_fd is None:
            return
        parent_fd, self._parent_fd = self._parent_fd, None
        try:
            if os.getpid() == self._pid and self._fd is not None:
                with _locked(parent_fd):
                    _remove(self._fd, self.path, parent_fd)
        finally:
            for descriptor in (self._fd, self._lock_fd, parent_fd):
                if descriptor is not None:
                    os.close(descriptor)
            self._fd = self._lock_fd = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_parent_fd", None) is not None and os.getpid() == self._pid:
            warnings.warn(f"run directory {self.path} was not closed", ResourceWarning, stacklevel=2)

    def _create(self, parent_fd: int) -> str:
        host = re.sub(r"[^A-Za-z0-9._]", "_", socket.gethostname()) or "host"
        name = f"tiermem-run-{host}-{os.getpid()}-{secrets.token_hex(4)}"
        os.mkdir(name, 0o700, dir_fd=parent_fd)
        try:
            self._fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock_fd = os.open(_MARKER, flags, 0o600, dir_fd=self._fd)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            marker = {
                "kind": _MAGIC,
                "directory": name,
                "pid": os.getpid(),
                "host": socket.gethostname(),
            }
            os.write(self._lock_fd, json.dumps(marker).encode())
        except OSError:
            self._abandon(parent_fd, name)
            raise
        return name

    def _abandon(self, parent_fd: int, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(_MARKER, dir_fd=self._fd)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent_fd)
        for descriptor in (self._fd, self._lock_fd):
            if descriptor is not None:
                os.close(descriptor)
        self._fd = self._lock_fd = None

    def _warn_of_filesystem(self) -> None:
        mount = find_mount(self.parent)
        if mount.in_memory:
            logger.warning(
                "%s is on %s, which is memory: what is 'on NVMe' there takes host memory outside of "
                "the budget; give a directory on a drive",
                self.parent,
                mount.filesystem,
            )
        elif mount.is_network:
            logger.warning(
                "%s is on %s, a network or user-space filesystem: expect a fraction of a drive's "
                "speed; give a directory on a local drive",
                self.parent,
                mount.filesystem,
            )


def is_live(directory: Path) -> bool:
    """Whether ``directory`` is a run directory whose run has not ended. Never blocks."""
    try:
        fd = os.open(directory, _DIRECTORY)
    except OSError:
        return False
    try:
        marker = _open_marker(fd, Path(directory).name)
        if marker is None:
            return False
        try:
            return not _try_lock(marker, fcntl.LOCK_SH)
        finally:
            os.close(marker)
    finally:
        os.close(fd)


def dead_bytes(parent: Path) -> int:
    """Bytes of the files of dead runs below ``parent``, which the next start reclaims."""
    total = 0
    for directory in parent.glob("tiermem-run-*"):
        if _NAME.fullmatch(directory.name) and not is_live(directory):
            with contextlib.suppress(OSError):  # somebody else reclaims them
                total += sum(
                    entry.stat(follow_symlinks=False).st_blocks * 512
                    for entry in os.scandir(directory)
                    if _OURS.fullmatch(entry.name)
                )
    return total


def reclaim(parent: Path, parent_fd: int) -> tuple[str, ...]:
    """Deletes the directories of dead runs below ``parent``; their names.

    The caller holds the lock on ``parent_fd``. On a filesystem that other machines see, only those
    of this machine are considered: whether locks are seen across machines depends on the mount.
    """
    shared = find_mount(parent).is_network
    here = re.sub(r"[^A-Za-z0-9._]", "_", socket.gethostname())
    reclaimed = []
    for name in sorted(os.listdir(parent_fd)):
        match = _NAME.fullmatch(name)
        if match is None or (shared and match["host"] != here):
            continue
        try:
            if _reclaim_one(parent, parent_fd, name):
                reclaimed.append(name)
                logger.info("reclaimed %s of a run that has ended", parent / name)
        except OSError as error:
            logger.warning("cannot reclaim %s: %s", parent / name, error.strerror)
    return tuple(reclaimed)


def _reclaim_one(parent: Path, parent_fd: int, name: str) -> bool:
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent_fd)
    except OSError:
        return False  # gone, a file, or a symbolic link
    try:
        marker = _open_marker(fd, name) if os.fstat(fd).st_uid == os.getuid() else None
        if marker is None:
            return False
        try:
            return _try_lock(marker, fcntl.LOCK_EX) and _remove(fd, parent / name, parent_fd)
        finally:
            os.close(marker)
    finally:
        os.close(fd)


def _remove(fd: int, path: Path, parent_fd: int) -> bool:
    """Unlinks our files in the directory ``fd``, the marker last, and the directory if then empty.

    The marker stays while anything foreign does, so that the next start looks again.
    """
    foreign = []
    for entry in os.listdir(fd):
        if entry == _MARKER:
            continue
        is_file = stat.S_ISREG(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode)
        if is_file and _OURS.fullmatch(entry):
            os.unlink(entry, dir_fd=fd)
        else:
            foreign.append(entry)
    if foreign:
        logger.warning("%s stays: it holds %s, which tiermem did not make", path, sorted(foreign))
        return False
    with contextlib.suppress(FileNotFoundError):  # somebody cleaned up by hand
        os.unlink(_MARKER, dir_fd=fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path.name, dir_fd=parent_fd)
    return True


def _open_marker(directory_fd: int, name: str) -> int | None:
    """A descriptor of the marker, if it is one that a run of ours wrote for this very directory."""
    try:
        # Not blocking: somebody may have put a FIFO there.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        marker = os.open(_MARKER, flags, dir_fd=directory_fd)
    except OSError:
        return None
    try:
        if stat.S_ISREG(os.fstat(marker).st_mode):
            contents = json.loads(os.pread(marker, _MARKER_LIMIT, 0))
            if (
                isinstance(contents, dict)
                and contents.get("kind") == _MAGIC
                and contents.get("directory") == name
            ):
                return marker
    except (OSError, ValueError):
        pass
    os.close(marker)
    return None


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(directory_fd: int) -> Iterator[bool]:
    """The lock on the user's path; False where the filesystem has no locks on directories."""
    # A descriptor of its own: two runtimes of one process exclude each other only through two.
    fd = os.open(".", _DIRECTORY, dir_fd=directory_fd)
    try:
        yield _lock_directory(fd)
    finally:
        os.close(fd)


def _lock_directory(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EBADF, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def _problem(path: Path) -> str:
    if not os.path.lexists(path):
        braces = "{" in str(path)
        filled = " (only tiermem's commands fill in what stands in braces; use an f-string)"
        return (
            f"path {str(path)!r} does not exist; create the directory first{filled if braces else ''}"
        )
    if not os.path.isdir(path):
        return f"path {str(path)!r} is not a directory; give a directory on the drive to use"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return (
            f"path {str(path)!r} is on a filesystem mounted read-only; remount it or give another path"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        return (
            f"path {str(path)!r} is not writable by user {os.getuid()}; change its mode or give another"
        )
    return ""
