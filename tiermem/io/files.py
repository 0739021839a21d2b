"""Preallocated files, with O_DIRECT where it works."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import resource

from tiermem.errors import IOContext, TierIOError
from tiermem.types import ALIGNMENT, format_bytes

logger = logging.getLogger(__name__)

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class StorageFile:
    """An open file of a known size: ``path``, ``fd``, ``direct`` (O_DIRECT in use), ``nbytes``.

    Made by `create` (preallocates) or `open` (an existing file). The first write into preallocated
    extents was seen to take twice as long as later ones (the file system marks them as written):
    measure after a warm-up.
    """

    def __init__(self, path: str, fd: int, nbytes: int, direct: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.direct = direct
        self._fd = fd

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], nbytes: int, *, direct: bool = True, exist_ok: bool = False
    ) -> StorageFile:
        """A new file with all its blocks reserved, so that a full disk is found now.

        With ``exist_ok`` an existing file keeps its bytes and is grown to ``nbytes``. With
        ``direct`` and no support for O_DIRECT it is buffered, and a warning says so. Raises
        TierIOError (ENOSPC, EFBIG, EEXIST, ...) naming the path; a file it made is removed then.
        """
        name = os.fspath(path)
        exists = exist_ok and os.path.exists(name)
        flags = os.O_RDWR | (0 if exists else os.O_CREAT | os.O_EXCL)
        fd, direct = _open(name, flags, direct, nbytes)
        try:
            if os.fstat(fd).st_size < nbytes:
                reserve(fd, name, nbytes)
            if direct and not exists:
                direct = _settle_direct(fd, name, write=True)
                os.ftruncate(fd, nbytes)  # the probe may have lengthened a file below one block
            elif direct:
                direct = _settle_direct(fd, name, write=False)
            return cls(name, fd, os.fstat(fd).st_size, direct)
        except BaseException:
            os.close(fd)
            if not exists:
                with contextlib.suppress(OSError):
                    os.unlink(name)
            raise

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, direct: bool = True, writable: bool = True
    ) -> StorageFile:
        """An existing file, as it is."""
        name = os.fspath(path)
        fd, direct = _open(name, os.O_RDWR if writable else os.O_RDONLY, direct, 0)
        try:
            direct = direct and _settle_direct(fd, name, write=False)
            return cls(name, fd, os.fstat(fd).st_size, direct)
        except BaseException:
            os.close(fd)
            raise

    @property
    def fd(self) -> int:
        """The descriptor. Raises ValueError after close, as files do."""
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        return self._fd

    def fileno(self) -> int:
        return self.fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        """Closes the descriptor. Idempotent. No transfer may be in flight."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        """Closes and deletes the file."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def __enter__(self) -> StorageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error(code: int, operation: str, path: str, nbytes: int, detail: str = "") -> TierIOError:
    return TierIOError(code, IOContext(operation, path, 0, nbytes), detail)


def _say_buffered(path: str, reason: str) -> None:
    logger.warning("%s is read and written through the page cache: %s", path, reason)


def _open(path: str, flags: int, direct: bool, nbytes: int) -> tuple[int, bool]:
    """The descriptor (close-on-exec) and whether O_DIRECT was accepted."""
    flags |= os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise _error(error.errno or errno.EIO, "open", path, nbytes) from error
            _say_buffered(path, f"open with O_DIRECT: {error.strerror}")
            # Some kernels create the file before they refuse the flag.
            if flags & os.O_EXCL:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
    try:
        return os.open(path, flags, 0o600), False
    except OSError as error:
        raise _error(error.errno or errno.EIO, "open", path, nbytes) from error


def reserve(fd: int, path: str, nbytes: int) -> None:
    """Lengthens the file to ``nbytes`` with its blocks reserved, so that a full disk shows now."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise _preallocation_error(error, fd, path, nbytes) from error
        reason = error.strerror
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        raise _preallocation_error(error, fd, path, nbytes) from error
    logger.warning("%s cannot be preallocated (%s): a full disk will show during the run", path, reason)


def free_bytes(place: str | os.PathLike[str] | int) -> int:
    """Bytes that the filesystem of a path or descriptor has left for ordinary users."""
    room = os.statvfs(place)
    return room.f_bavail * room.f_frsize


def _preallocation_error(error: OSError, fd: int, path: str, nbytes: int) -> TierIOError:
    code = error.errno or errno.EIO
    detail = ""
    if code in (errno.ENOSPC, errno.EDQUOT):
        # What the failed attempt took counts as free: it is given back with the file.
        free = free_bytes(fd) + os.fstat(fd).st_blocks * 512
        detail = (
            f"it needs {nbytes} bytes ({format_bytes(nbytes)}) and {free} ({format_bytes(free)}) are "
            "free there; free some, give another path, or keep more in host memory"
        )
    elif code == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit_text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        detail = (
            f"the largest file allowed is {limit_text} by RLIMIT_FSIZE (ulimit -f), and the file "
            "system has its own limit; raise it or use more paths"
        )
    return _error(code, "preallocation", path, nbytes, detail)


def _settle_direct(fd: int, path: str, *, write: bool) -> bool:
    """Whether O_DIRECT transfers really work: some file systems refuse only the first transfer.

    Otherwise the flag is taken off the descriptor and a warning says so. ``write`` also writes
    one block of zeros at the start: only for a file that holds nothing yet.
    """
    with mmap.mmap(-1, ALIGNMENT) as block:
        try:
            if write:
                os.pwritev(fd, [block], 0)
            os.preadv(fd, [block], 0)
            return True
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise _error(error.errno or errno.EIO, "first transfer", path, ALIGNMENT) from error
            _say_buffered(path, f"first O_DIRECT transfer: {error.strerror}")
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False
