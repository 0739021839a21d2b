"""`ParameterFiles`: memory for parameters that are not sharded yet, in files without a name."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tiermem.errors import IOContext, TierIOError
from tiermem.store.mounts import find_mount
from tiermem.types import format_bytes
from tiermem.zero import compat
from tiermem.zero.layout import dense_stride

logger = logging.getLogger(__name__)

SMALLEST_BYTES = 64 << 10
"""What is smaller stays in ordinary memory: a file takes whole pages and an entry in the process's map
of memory, of which the kernel allows some 65,000."""

_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
"""What a filesystem says that cannot make a file without a name."""


class ParameterFiles:
    """Makes tensors over shared mappings of files in ``directories``, in turn.

    Such pages are the page cache's: the kernel writes them back and takes them where memory is short,
    which it cannot do with ordinary memory. A file has no name, so nothing is left behind however the
    process ends; it is gone, with its descriptor, when the tensor's storage is.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = itertools.cycle(directories)
        for directory in directories:
            try:
                in_memory = find_mount(directory).in_memory
            except OSError as error:
                raise _failed(error, "opening", directory, 0) from error
            if in_memory:
                logger.warning(
                    "%s lies in memory: parameters in its files take as much of it as elsewhere",
                    directory,
                )

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in ordinary memory, which it has for itself, and worth a file."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_inference():
            return False
        if compat.is_distributed(tensor) or tensor.nbytes < SMALLEST_BYTES:
            return False
        dense = dense_stride(tensor) == tensor.stride() and tensor.storage_offset() == 0
        return dense and tensor.untyped_storage().nbytes() == tensor.nbytes and not self.holds(tensor)

    @staticmethod
    def holds(tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in a file."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor``, which is dense, in a file. Raises `TierIOError`, ENOSPC where there is
        no room for it."""
        directory = next(self._directories)
        descriptor = self._open(directory)
        try:
            os.posix_fallocate(descriptor, 0, tensor.nbytes)
            mapped = torch.from_file(
                f"/proc/self/fd/{descriptor}", shared=True, size=tensor.numel(), dtype=tensor.dtype
            )
        except OSError as error:
            raise _failed(error, "preallocation", directory, tensor.nbytes) from error
        finally:
            os.close(descriptor)  # the mapping keeps the file
        return mapped.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    @staticmethod
    def _open(directory: Path) -> int:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_UNNAMED or not directory.is_dir():
                raise _failed(error, "opening", directory, 0) from error
        try:
            descriptor, path = tempfile.mkstemp(dir=directory, prefix="tiermem-param-")
            os.unlink(path)
        except OSError as error:
            raise _failed(error, "opening", directory, 0) from error
        return descriptor


def _failed(error: OSError, operation: str, directory: Path, nbytes: int) -> TierIOError:
    remedy = "Remedy: a directory that exists and can be written, as one of the configuration's paths"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = os.statvfs(directory)
        remedy = (
            f"a parameter of {nbytes} bytes ({format_bytes(nbytes)}) is to be kept there until it is "
            f"sharded, {format_bytes(free.f_bavail * free.f_frsize)} are free. Remedy: make room, or "
            f"name directories with more of it as the configuration's paths"
        )
    context = IOContext(operation, str(directory), 0, nbytes)
    return TierIOError(error.errno or errno.EIO, context, remedy)
