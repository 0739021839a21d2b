"""What memory `open_file` takes: anything contiguous on the host, and a clear refusal of the rest."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from file_rig import delay_next, open_or_skip, random_file

import tiermem.io as tio


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tio.AsyncFile]:
    random_file(tmp_path / "f", 100_000)
    with tio.open_file(tmp_path / "f", "r+", backend="threads") as file:
        yield file


MAKERS: dict[str, Callable[[int], object]] = {
    "bytearray": bytearray,
    "memoryview": lambda size: memoryview(bytearray(size)),
    "array": lambda size: array.array("B", bytes(size)),
    "ctypes": lambda size: (ctypes.c_char * size)(),
    "mmap": lambda size: mmap.mmap(-1, size),
    "numpy": lambda size: np.zeros(size, np.uint8),
    "aligned": tio.aligned_buffer,
}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_taken(file: tio.AsyncFile, tmp_path: Path, kind: str) -> None:
    memory = MAKERS[kind](5001)
    file.read_into(memory, 17).wait()
    file.write_from(memory, 50_000).wait()
    data = (tmp_path / "f").read_bytes()
    assert data[50_000:55_001] == data[17:5018]


def test_a_dlpack_object(file: tio.AsyncFile, tmp_path: Path) -> None:
    class Foreign:
        def __init__(self, inner: np.ndarray) -> None:
            self.inner = inner

        def __dlpack__(self, **arguments: object) -> object:
            return self.inner.__dlpack__(**arguments)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    values = np.zeros(100, np.float32)
    file.read_into(Foreign(values), 3).wait()
    assert values.tobytes() == (tmp_path / "f").read_bytes()[3:403]


def test_read_only_memory_is_written_from_but_not_read_into(
    file: tio.AsyncFile, tmp_path: Path
) -> None:
    frozen = np.arange(10)
    frozen.flags.writeable = False
    for memory in (b"0123456789", memoryview(b"0123"), frozen):
        file.write_from(memory, 5).wait()
        assert (tmp_path / "f").read_bytes()[5:].startswith(bytes(memoryview(memory)))
        with pytest.raises(ValueError, match="is read-only"):
            file.read_into(memory, 0)


class OnDevice:
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class OnCuda:
    __cuda_array_interface__: dict[str, object] = {}  # noqa: RUF012


@pytest.mark.parametrize(
    ("memory", "error", "words"),
    [
        (np.zeros((4, 4))[:, 1], ValueError, "numpy.ascontiguousarray"),
        (np.zeros((4, 3)).T, ValueError, "is not contiguous"),
        (memoryview(bytearray(10))[::2], ValueError, "is not contiguous"),
        (np.array([{}, {}]), ValueError, "Python objects"),
        (OnDevice(), ValueError, "host memory"),
        (OnCuda(), ValueError, "a CUDA device"),
        ([1, 2, 3], TypeError, "buffer protocol or DLPack"),
        ("text", TypeError, "builtins.str has no bytes"),
        (None, TypeError, "has no bytes"),
    ],
)
def test_refused(file: tio.AsyncFile, memory: object, error: type[Exception], words: str) -> None:
    for start in (file.read_into, file.write_from):
        with pytest.raises(error, match=words):
            start(memory, 0)


def test_tensors_refused(file: tio.AsyncFile) -> None:
    torch = pytest.importorskip("torch")
    refused = {
        torch.zeros(4, 4).t()[1:]: "not contiguous",
        torch.zeros(4, device="meta"): "device meta",
        torch.zeros(4).to_sparse(): "give a dense tensor",
        torch.zeros(4, dtype=torch.complex64).conj(): "resolve_conj",
    }
    for tensor, words in refused.items():
        with pytest.raises(ValueError, match=words):
            file.write_from(tensor, 0)
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        with pytest.raises(ValueError, match="host memory"):
            file.read_into(torch.zeros(4, device=device), 0)


def test_an_offset_is_a_whole_number(file: tio.AsyncFile) -> None:
    with pytest.raises(TypeError, match=r"offset is 1\.5"):
        file.read_into(bytearray(1), 1.5)  # type: ignore[arg-type]
    memory = np.zeros(5, np.uint8)
    file.read_into(memory, np.int64(7)).wait()  # type: ignore[arg-type]
    file.read_into(again := bytearray(5), 7).wait()
    assert memory.tobytes() == bytes(again)


def test_arguments(file: tio.AsyncFile, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"offset is -1; it must be 0 to \d+"):
        file.read_into(bytearray(1), -1)
    with pytest.raises(ValueError, match="offset is"):
        file.write_from(b"12", (1 << 63) - 2)
    with (
        tio.open_file(tmp_path / "f", backend="threads") as other,
        pytest.raises(tio.ConfigError, match=r"mode 'r\+'"),
    ):
        other.write_from(b"1", 0)
    with pytest.raises(tio.ConfigError, match="must be one of r, r\\+, w, x"):
        tio.open_file(tmp_path / "f", "rb")
    with pytest.raises(tio.ConfigError, match="nbytes is 5"):
        tio.open_file(tmp_path / "f", nbytes=5)
    with pytest.raises(tio.TierIOError, match="No such file"):
        tio.open_file(tmp_path / "absent")
    with pytest.raises(tio.TierIOError, match="File exists"):
        tio.open_file(tmp_path / "f", "x")
    with tio.open_file(tmp_path / "new", "x", nbytes=10_000, backend="threads") as made:
        assert made.nbytes == 10_000
    with tio.open_file(tmp_path / "f", "w", backend="threads") as emptied:
        assert emptied.nbytes == 0


def test_requests_hold_their_memory(backend: str, tmp_path: Path) -> None:
    random_file(tmp_path / "f", 100_000)
    with open_or_skip(backend, tmp_path / "f") as file:
        delay_next(file, tio.Op.READ)
        memory = np.zeros(10_000, np.uint8)
        died = weakref.ref(memory)
        request = file.read_into(memory, 0)
        del memory
        gc.collect()
        assert died() is not None
        request.wait()
        gc.collect()
        assert died() is None
        grown = bytearray(10_000)
        delay_next(file, tio.Op.READ)
        request = file.read_into(grown, 0)
        with pytest.raises(BufferError):
            grown.extend(b"x" * 100_000)
        request.wait()
        del request
        gc.collect()
        grown.extend(b"x")


def test_no_torch_is_imported(tmp_path: Path) -> None:
    random_file(tmp_path / "f", 100)
    code = (
        "import sys, tiermem.io as tio\n"
        "with tio.open_file(sys.argv[1]) as file:\n"
        "    file.read_into(bytearray(10), 0).wait()\n"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], check=True, timeout=60)
