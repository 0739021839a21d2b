"""`open_file` moves exactly the bytes asked for, whatever their type, place and length."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest
from file_rig import open_or_skip, random_file, require_direct
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiermem.io as tio
from tiermem.io.memory import span_of

SIZE = 300_001
GUARD = 64
DTYPES = [
    "?", "i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", "<i8", ">i8", "<u8", "<f2", "<f4", ">f4",
    "<f8", ">f8", "g", "<c8", "<c16", "G", "S7", "<U3", "V5", "M8[ns]", "m8[s]", "i1,<f4,<i2",
]  # fmt: skip


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype(tmp_path: Path, backend: str, dtype: str, direct: bool) -> None:
    data = random_file(tmp_path / "f", SIZE)
    kind = np.dtype(dtype)
    with open_or_skip(backend, tmp_path / "f", direct=direct) as file:
        for offset, count in ((0, 1), (1, 3), (4095, 2), (4097, 1001), (8192, 4096 // kind.itemsize)):
            array = np.zeros(count, kind)
            file.read_into(array, offset).wait()
            assert array.tobytes() == data[offset : offset + array.nbytes]
            file.write_from(array, offset + 7).wait()
            back = np.zeros(count, kind)
            file.read_into(back, offset + 7).wait()
            assert back.tobytes() == array.tobytes()
            data = data[: offset + 7] + array.tobytes() + data[offset + 7 + array.nbytes :]
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("backend", tio.BACKENDS)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_any_place(tmp_path: Path, backend: str, seed: int) -> None:
    """A mix of aligned and unaligned transfers leaves the file and the memory around them right."""
    chance = random.Random(seed)
    path = tmp_path / "f"
    expected = bytearray(random_file(path, SIZE))
    options = tio.QueueOptions(8192, 4, 4)
    with open_or_skip(backend, path, options=options) as file, tio.aligned_buffer(1 << 20) as buffer:
        for _ in range(30):
            length = chance.choice([1, 511, 4096, 5000, 12288, 40961])
            offset = chance.choice([0, 4096, 8192, chance.randrange(SIZE - length)])
            at = GUARD * 64 + chance.choice([0, offset % 4096, 512, chance.randrange(4096)])
            view = buffer.view
            if chance.random() < 0.5:
                view[at : at + length] = chance.randbytes(length)
                file.write_from(view[at : at + length], offset).wait()
                expected[offset : offset + length] = view[at : at + length]
            else:
                buffer.fill(0x5A)
                file.read_into(view[at : at + length], offset).wait()
                assert view[at : at + length] == expected[offset : offset + length]
                assert bytes(view[at - GUARD : at]) == b"\x5a" * GUARD
                assert bytes(view[at + length : at + length + GUARD]) == b"\x5a" * GUARD
            view.release()
    assert path.read_bytes() == expected


def test_neighbours_in_one_block(tmp_path: Path, backend: str) -> None:
    """Writes that share blocks do not undo each other, all in flight at once."""
    data = random.Random(1).randbytes(200_003)
    with open_or_skip(backend, tmp_path / "f", "w") as file:
        pieces = [(at, data[at : at + 997]) for at in range(0, len(data), 997)]
        random.Random(2).shuffle(pieces)
        tio.wait([file.write_from(piece, at) for at, piece in pieces])
        file.flush()
        assert file.nbytes == len(data)
    assert (tmp_path / "f").read_bytes() == data


def test_only_the_edges_go_through_the_page_cache(tmp_path: Path, backend: str) -> None:
    random_file(tmp_path / "f", SIZE)
    with open_or_skip(backend, tmp_path / "f") as file, tio.aligned_buffer(1 << 20) as buffer:
        require_direct(file)
        cached, direct = file._descriptors.cached, file._descriptors.direct
        assert direct is not None
        span = span_of(buffer.view[100:20100], writable=True)
        assert file._cut(span, 8292) == [
            (cached, 8292, 12288),
            (direct.fd, 12288, 24576),
            (cached, 24576, 28292),
        ]
        assert file._cut(span_of(buffer.view[:8192], writable=True), 4096) == [(direct.fd, 4096, 12288)]
        assert file._cut(span_of(buffer.view[1:8193], writable=True), 4096) == [(cached, 4096, 12288)]
        assert file._cut(span_of(buffer.view[1:4001], writable=True), 1) == [(cached, 1, 4001)]


def test_the_end_of_the_file(tmp_path: Path, backend: str) -> None:
    data = random_file(tmp_path / "f", 10_001)
    with open_or_skip(backend, tmp_path / "f") as file, tio.aligned_buffer(1 << 16) as buffer:
        file.read_into(buffer.view[:10_001], 0).wait()
        assert bytes(buffer.view[:10_001]) == data
        for offset, length in ((0, 10_002), (0, 12_288), (10_001, 1), (8192, 4096), (50_000, 10)):
            request = file.read_into(buffer.view[:length], offset)
            for _ in range(2):  # again and again the same
                with pytest.raises(tio.TierIOError, match="the file ends there") as caught:
                    request.wait()
                assert caught.value.errno == 5
                assert caught.value.context.path == str(tmp_path / "f")
        file.read_into(buffer.view[:0], 99_999).wait()
        file.write_from(b"end", 20_000).wait()
        assert file.nbytes == 20_003
    assert (tmp_path / "f").read_bytes() == data + bytes(20_000 - 10_001) + b"end"


@pytest.mark.slow
def test_more_than_2_gib(tmp_path: Path, backend: str) -> None:
    """One transfer of more bytes than 32 bits count, at an offset that they do not reach."""
    length, offset = (2 << 30) + 4097, (5 << 30) + 1
    marks = (0, 1 << 20, (2 << 30) - 1, length - 3)
    with (
        open_or_skip(backend, tmp_path / "f", "w") as file,
        tio.aligned_buffer(length + 1) as buffer,  # untouched pages cost nothing
    ):
        memory = np.frombuffer(buffer.view, np.uint8)[1:]
        for at in marks:
            file.write_from(np.array([at % 251 + 1], np.uint8), offset + at).wait()
        file.write_from(np.zeros(3, np.uint8), offset + length).wait()
        assert file.nbytes == offset + length + 3
        file.read_into(memory, offset).wait()
        assert [int(memory[at]) for at in marks] == [at % 251 + 1 for at in marks]
        assert int(np.count_nonzero(memory)) == len(marks)
        memory[length // 2] = 77
        file.write_from(memory, offset + 8192).wait()
        one = np.zeros(1, np.uint8)
        file.read_into(one, offset + 8192 + length // 2).wait()
        assert one[0] == 77
        del memory
    (tmp_path / "f").unlink()


def test_what_numpy_and_torch_allocate(tmp_path: Path, backend: str) -> None:
    torch = pytest.importorskip("torch")
    data = random_file(tmp_path / "f", 3_000_000)
    with open_or_skip(backend, tmp_path / "f", "r") as file:
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64):
            tensor = torch.empty(30, 1001, dtype=dtype)
            file.read_into(tensor, 4096).wait()
            size = tensor.numel() * tensor.element_size()
            assert ctypes.string_at(tensor.data_ptr(), size) == data[4096 : 4096 + size]
        array = np.empty((1000, 1000), np.float16)
        file.read_into(array[10:20], 8).wait()
        assert array[10:20].tobytes() == data[8 : 8 + 20_000]
