"""Files of `tiermem.io.open_file`, for the tests of this folder."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from io_rig import make_engine

import tiermem.io as tio

BACKOFFS = 16  # refusals in a row: 0.4 s with the pauses between them


def open_or_skip(backend: str, path: Path, mode: str = "r+", **options: object) -> tio.AsyncFile:
    make_engine(backend).close()
    return tio.open_file(path, mode, backend=backend, **options)  # type: ignore[arg-type]


def random_file(path: Path, nbytes: int) -> bytes:
    data = random.Random(nbytes).randbytes(nbytes)
    path.write_bytes(data)
    return data


def delay_next(file: tio.AsyncFile, op: tio.Op) -> None:
    """The next chunk is refused and tried again for a while, and holds up what comes after it."""
    kind = tio.FaultKind.SUBMIT_ERROR
    file.engine.inject(tio.Fault(op, 0, kind, errno.EAGAIN, BACKOFFS))


def require_direct(file: tio.AsyncFile) -> None:
    if not file.direct:
        pytest.skip("the file system has no O_DIRECT")
