"""An engine with a file and a buffer, for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

import tiermem.io as tio
from tiermem.errors import ConfigError

MIB = 1 << 20
CHUNK = 64 << 10


def make_engine(backend: str) -> tio.Engine:
    if backend != "threads":
        pytest.importorskip("tiermem._native", reason="the native core is not built")
    try:
        return tio.open_engine(backend)
    except ConfigError as error:
        pytest.skip(str(error))


@dataclass
class Rig:
    """An engine with one queue, a file and a buffer of the same size, all of random bytes."""

    engine: tio.Engine
    queue: int
    file: tio.StorageFile
    buffer: tio.AlignedBuffer
    data: bytes

    def read(self, offset: int, length: int, *, at: int = 0, **options: object) -> tio.Request:
        return self.engine.submit(  # type: ignore[arg-type]
            self.queue, tio.Op.READ, self.file.fd, offset, self.buffer.address + at, length, **options
        )

    def write(self, offset: int, length: int, *, at: int = 0, **options: object) -> tio.Request:
        return self.engine.submit(  # type: ignore[arg-type]
            self.queue, tio.Op.WRITE, self.file.fd, offset, self.buffer.address + at, length, **options
        )

    def memory(self, at: int, length: int) -> bytes:
        with self.buffer.view as view:
            return bytes(view[at : at + length])

    def load(self, data: bytes, at: int = 0) -> None:
        with self.buffer.view as view:
            view[at : at + len(data)] = data

    def on_disk(self, offset: int, length: int) -> bytes:
        with open(self.file.path, "rb") as file:
            return os.pread(file.fileno(), length, offset)


RigMaker = Callable[..., Rig]
