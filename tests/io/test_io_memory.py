"""Registered memory: same bytes, only what transfers touch is pinned, and it is given back."""

from __future__ import annotations

import os
import random
import re
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from io_rig import CHUNK, MIB, RigMaker, make_engine

import tiermem.io as tio
from tiermem.errors import StateError

SLAB = 32 * MIB


@pytest.fixture
def uring() -> Iterator[tio.Engine]:
    engine = make_engine("io_uring")
    yield engine
    engine.close()


def pinned_bytes() -> int:
    found = re.search(r"VmPin:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def require_registration(engine: tio.Engine) -> None:
    """After the first transfer: skips where the kernel or a limit forbids what is tested."""
    if "takes Linux" in engine.registration or "registers no more" in engine.registration:
        pytest.skip(engine.registration)


@pytest.mark.parametrize("direct", [True, False])
def test_same_bytes(rig: RigMaker, direct: bool) -> None:
    """Transfers inside, outside and across the ends of what is registered."""
    one = rig(4 * MIB, direct=direct)
    one.engine.register(one.buffer.address + MIB, 2 * MIB)
    one.read(0, 4 * MIB).wait()
    assert one.memory(0, 4 * MIB) == one.data
    new = random.Random(3).randbytes(4 * MIB)
    one.load(new)
    one.write(MIB - 8192, 2 * MIB, at=MIB - 8192).wait()
    assert one.on_disk(MIB - 8192, 2 * MIB) == new[MIB - 8192 : 3 * MIB - 8192]
    one.engine.unregister(one.buffer.address + MIB)
    one.read(0, MIB, at=2 * MIB).wait()
    assert one.memory(2 * MIB, MIB - 8192) == one.data[: MIB - 8192]


def test_others_say_that_they_do_nothing(backend: str, engine: tio.Engine) -> None:
    if backend == "io_uring":
        pytest.skip("it has a use for it")
    with tio.aligned_buffer(MIB) as buffer:
        engine.register(buffer.address, MIB)
        assert engine.registration == f"{backend} has no use for registered memory"
        engine.unregister(buffer.address)


def test_pins_what_is_touched(uring: tio.Engine, tmp_path: Path) -> None:
    before = pinned_bytes()
    with (
        tio.StorageFile.create(tmp_path / "f", 4 * MIB) as file,
        tio.aligned_buffer(4 * SLAB) as buffer,
    ):
        uring.register(buffer.address, buffer.nbytes)
        queue = uring.add_queue(tio.QueueOptions(MIB))  # later than the memory
        assert pinned_bytes() == before
        uring.submit(queue, tio.Op.READ, file.fd, 0, buffer.address + SLAB + MIB, 2 * MIB).wait()
        require_registration(uring)
        assert pinned_bytes() == before + SLAB
        assert uring.registration == f"{SLAB} bytes (32.0 MiB) registered, used by 2 chunks"
        across = buffer.address + 2 * SLAB - MIB // 2  # of three chunks one lies on the border
        uring.submit(queue, tio.Op.WRITE, file.fd, 0, across - MIB, 3 * MIB).wait()
        assert pinned_bytes() == before + 2 * SLAB
        assert "used by 4 chunks" in uring.registration
        uring.unregister(buffer.address)
        assert pinned_bytes() == before
        assert "used by 4 chunks" in uring.registration


def test_memory_that_changed_under_its_address(uring: tio.Engine, tmp_path: Path) -> None:
    """Unregistered before unmapping, a new mapping at the same place gets its own bytes."""
    queue = uring.add_queue(tio.QueueOptions(CHUNK))
    data = random.Random(4).randbytes(MIB)
    (tmp_path / "f").write_bytes(data)
    addresses = set()
    with open(tmp_path / "f", "rb") as file:
        for _ in range(5):
            with tio.aligned_buffer(MIB) as buffer:
                uring.register(buffer.address, MIB)
                uring.submit(queue, tio.Op.READ, file.fileno(), 0, buffer.address, MIB).wait()
                with buffer.view as view:
                    assert bytes(view) == data
                addresses.add(buffer.address)
                uring.unregister(buffer.address)
    assert len(addresses) < 5  # else nothing was tested


def test_arguments(uring: tio.Engine) -> None:
    with tio.aligned_buffer(16 * MIB) as buffer:
        uring.register(buffer.address, 2 * MIB)
        with pytest.raises(OSError, match="File exists"):
            uring.register(buffer.address + MIB, 2 * MIB)
        with pytest.raises(OSError, match="Invalid argument"):
            uring.register(buffer.address, 0)
        uring.unregister(buffer.address + 4096)  # never registered: nothing to end
        for number in range(1, 8):
            uring.register(buffer.address + 2 * number * MIB, MIB)
        assert "registered" in uring.registration
        uring.register(buffer.address + MIB * 15, MIB // 2)
        assert uring.registration == "too many ranges of memory are registered"
        uring.close()
        with pytest.raises(StateError, match="closed"):
            uring.register(buffer.address, MIB)
        uring.unregister(buffer.address)


def test_close_gives_it_back_though_a_child_has_the_ring(uring: tio.Engine, tmp_path: Path) -> None:
    before = pinned_bytes()
    with (
        tio.StorageFile.create(tmp_path / "f", MIB) as file,
        tio.aligned_buffer(SLAB) as buffer,
    ):
        queue = uring.add_queue(tio.QueueOptions(CHUNK))
        uring.register(buffer.address, SLAB)
        uring.submit(queue, tio.Op.READ, file.fd, 0, buffer.address, MIB).wait()
        require_registration(uring)
        assert pinned_bytes() == before + SLAB
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            uring.close()
            assert pinned_bytes() == before
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
