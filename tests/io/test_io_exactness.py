"""What is written is what is read, byte for byte, at any length and from many threads."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from io_rig import MIB, RigMaker

import tiermem.io as tio
from tiermem.types import round_up


@pytest.mark.parametrize("numel", [127, 129, 4095, (1 << 20) + 1])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("direct", [True, False])
def test_odd_lengths(rig: RigMaker, numel: int, itemsize: int, direct: bool) -> None:
    nbytes = numel * itemsize
    length = round_up(nbytes) if direct else nbytes
    one = rig(2 * round_up(nbytes), direct=direct, chunk_bytes=256 << 10)
    new = random.Random(1).randbytes(length)
    one.load(new)
    start = round_up(nbytes)
    one.write(start, length).wait()
    assert one.on_disk(0, start) == one.data[:start]
    assert one.on_disk(start, length) == new
    assert one.on_disk(start + length, start) == one.data[start + length :]
    one.load(bytes(length))
    one.read(start, length).wait()
    assert one.memory(0, length) == new


def test_buffered_at_any_offset(rig: RigMaker) -> None:
    one = rig(MIB, direct=False, chunk_bytes=4096)
    one.read(12345, 100_001, at=7).wait()
    assert one.memory(7, 100_001) == one.data[12345 : 12345 + 100_001]
    assert one.memory(0, 7) == bytes(7)


def test_zero_length(rig: RigMaker) -> None:
    request = rig().read(0, 0)
    request.wait()
    assert request.done()


def test_from_several_threads(rig: RigMaker) -> None:
    one = rig(4 * MIB)
    part = MIB
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            base = number * part
            generator = random.Random(number)
            for _ in range(20):
                length = 4096 * generator.randint(1, 64)
                offset = base + 4096 * generator.randint(0, (part - length) // 4096)
                new = generator.randbytes(length)
                one.load(new, base)
                one.write(offset, length, at=base).wait()
                one.load(bytes(length), base)
                one.read(offset, length, at=base).wait()
                assert one.memory(base, length) == new
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_copy(rig: RigMaker) -> None:
    one = rig(10 * MIB)
    source = random.Random(2).randbytes(5 * MIB - 3)
    one.load(source)
    address = one.buffer.address
    request = one.engine.copy(address + 5 * MIB, address, len(source))
    request.wait()
    assert one.memory(5 * MIB, len(source)) == source
    assert one.engine.stats().copied_bytes == len(source)


@pytest.mark.parametrize("direct", [True, False])
def test_read_past_the_end(rig: RigMaker, direct: bool) -> None:
    one = rig(MIB, direct=direct)
    request = one.read(MIB - 8192, 65536)
    with pytest.raises(OSError, match="the file ends there") as caught:
        request.wait()
    assert "read of 65536 bytes at offset" in str(caught.value)
    assert one.memory(0, 8192) == one.data[-8192:]
    with pytest.raises(OSError, match="the file ends there"):
        one.read(2 * MIB, 4096).wait()


@pytest.mark.parametrize("direct", [True, False])
def test_read_past_an_odd_end(rig: RigMaker, direct: bool) -> None:
    one = rig(5000, direct=direct)
    with pytest.raises(OSError, match="the file ends there"):
        one.read(0, 8192).wait()


@pytest.mark.slow
def test_more_than_2_gib(engine: tio.Engine, tmp_path: Path) -> None:
    """One request beyond what one system call moves, of a sparse file. (Needs 2 GiB of memory.)"""
    length = (2 << 30) + 8192
    queue = engine.add_queue(tio.QueueOptions(chunk_bytes=8 << 20))
    with open(tmp_path / "sparse", "w+b") as file, tio.aligned_buffer(length) as buffer:
        file.seek(length - 8)
        file.write(b"the last")
        file.flush()
        direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:
            engine.submit(queue, tio.Op.READ, direct, 0, buffer.address, length).wait()
        finally:
            os.close(direct)
        with buffer.view as view:
            assert bytes(view[-8:]) == b"the last"
    assert engine.stats().read_bytes == length
