"""`PathFile`: the growing preallocated file of one generation on one storage path."""

from __future__ import annotations

import errno
import logging
import os
import resource
from pathlib import Path

from tiermem.errors import IOContext, TierIOError
from tiermem.io.files import StorageFile, free_bytes
from tiermem.types import format_bytes

logger = logging.getLogger(__name__)

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def check_file_limit(context: IOContext) -> None:
    """Raises `TierIOError` (EFBIG) if the process may not have a file that long."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    end = context.offset + context.length
    if limit != resource.RLIM_INFINITY and end > limit:
        raise TierIOError(
            errno.EFBIG,
            context,
            f"a file of {end} bytes ({format_bytes(end)}) is needed there; the limit on file sizes is "
            f"{limit} bytes. Raise it (ulimit -f), add a path, or keep more in host memory",
        )


class PathFile:
    """``gen<generation>.bin`` in a run's directory. Not thread safe.

    Raises `TierIOError` if it cannot be made.
    """

    def __init__(self, directory: Path, generation: int, *, direct: bool) -> None:
        self.path = directory / f"gen{generation}.bin"
        self._file = StorageFile.create(self.path, 0, direct=direct)
        self.direct = self._file.direct
        """Whether transfers bypass the page cache."""
        self._said_lazy = False

    @property
    def fd(self) -> int:
        return self._file.fd

    @property
    def nbytes(self) -> int:
        """Bytes preallocated."""
        return self._file.nbytes

    def grow(self, nbytes: int) -> int:
        """Preallocates ``nbytes`` more; the offset where they start.

        Raises `TierIOError` (ENOSPC, with needed and free bytes) and changes nothing if they are not
        to be had.
        """
        start = self.nbytes
        try:
            self._preallocate(start, nbytes)
        except OSError as error:
            self.shrink(start)  # gives back what was allocated before it failed
            context = IOContext("preallocation", str(self.path), start, nbytes)
            check_file_limit(context)
            raise TierIOError(error.errno or errno.EIO, context, self._lack(error, nbytes)) from error
        self._file.nbytes = start + nbytes
        return start

    def shrink(self, nbytes: int) -> None:
        """Gives back all from ``nbytes`` on: the undoing of `grow`. Raises nothing, since there is an
        error on its way already; where the drive refuses, the space stays the file's and is used by
        the next `grow`."""
        try:
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            logger.warning("%s cannot be shortened: %s", self.path, error.strerror)
        self._file.nbytes = nbytes

    def close(self) -> None:
        """Closes the descriptor; the file goes with its directory. Idempotent."""
        self._file.close()

    def _lack(self, error: OSError, nbytes: int) -> str:
        """What preallocation lacked, and the remedy; "" where it was not room."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return ""
        free = free_bytes(self.fd)
        return (
            f"{nbytes} bytes ({format_bytes(nbytes)}) are needed there and {free} bytes "
            f"({format_bytes(free)}) are free; free space, add a path, or keep more in host memory"
        )

    def _preallocate(self, start: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, start, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(self.fd, start + nbytes)
            if not self._said_lazy:
                self._said_lazy = True
                logger.warning(
                    "%s cannot be preallocated (%s): a full disk will only show during the run",
                    self.path,
                    error.strerror,
                )
