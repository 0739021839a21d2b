"""Every test runs against every engine that works here."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from io_rig import CHUNK, MIB, Rig, RigMaker, make_engine

import tiermem.io as tio


@pytest.fixture(params=tio.BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(backend: str) -> Iterator[tio.Engine]:
    engine = make_engine(backend)
    yield engine
    engine.close()


@pytest.fixture
def rig(engine: tio.Engine, tmp_path: Path) -> Iterator[RigMaker]:
    """Makes a `Rig`; ``rig(nbytes, direct=..., chunk_bytes=..., read_depth=..., write_depth=...)``."""
    made: list[Rig] = []

    def make(nbytes: int = MIB, *, direct: bool = True, **options: int) -> Rig:
        options = {"chunk_bytes": CHUNK, "read_depth": 8, "write_depth": 8} | options
        queue = engine.add_queue(tio.QueueOptions(**options))
        file = tio.StorageFile.create(tmp_path / f"data{len(made)}", nbytes, direct=direct)
        data = random.Random(nbytes).randbytes(nbytes)
        with open(file.path, "r+b") as plain:
            plain.write(data)
            plain.flush()
            os.fsync(plain.fileno())
        one = Rig(engine, queue, file, tio.aligned_buffer(max(nbytes, 4096)), data)
        made.append(one)
        return one

    yield make
    for one in made:
        one.file.close()
