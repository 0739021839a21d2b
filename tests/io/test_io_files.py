"""Storage files: preallocated, O_DIRECT or honestly not, errors with the path and the remedy."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiermem.io.files as files
from tiermem.errors import TierIOError
from tiermem.io import StorageFile
from tiermem.types import ALIGNMENT

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "small"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(point)]
    result = subprocess.run(mount, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted: {result.stderr.strip()}")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def test_create_reserves_everything(tmp_path: Path) -> None:
    with StorageFile.create(tmp_path / "f", 3 * MIB + 5) as file:
        assert (file.nbytes, file.path) == (3 * MIB + 5, str(tmp_path / "f"))
        status = os.fstat(file.fd)
        assert status.st_size == 3 * MIB + 5
        assert status.st_blocks * 512 >= 3 * MIB
        assert not os.get_inheritable(file.fd)
    assert file.closed
    with pytest.raises(ValueError, match="is closed"):
        _ = file.fd


def test_smaller_than_a_block(tmp_path: Path) -> None:
    with StorageFile.create(tmp_path / "f", 100) as file:
        assert os.fstat(file.fd).st_size == 100


def test_existing_file_is_refused_or_kept(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * ALIGNMENT)
    with pytest.raises(TierIOError, match="File exists") as caught:
        StorageFile.create(path, ALIGNMENT)
    assert caught.value.context.path == str(path)
    with StorageFile.create(path, 2 * ALIGNMENT, exist_ok=True) as file:
        assert file.nbytes == 2 * ALIGNMENT
    assert path.read_bytes() == b"x" * ALIGNMENT + bytes(ALIGNMENT)
    with StorageFile.open(path, writable=False) as file:
        assert file.nbytes == 2 * ALIGNMENT


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TierIOError, match="No such file") as caught:
        StorageFile.open(tmp_path / "f")
    assert caught.value.errno == errno.ENOENT


def test_full_disk_is_found_at_creation(small_disk: Path) -> None:
    with pytest.raises(TierIOError, match="it needs 67108864 bytes") as caught:
        StorageFile.create(small_disk / "f", 64 * MIB)
    assert caught.value.errno == errno.ENOSPC
    assert "4194304 (4.0 MiB) are free" in str(caught.value)
    assert str(small_disk / "f") in str(caught.value)
    assert not (small_disk / "f").exists()


def test_file_size_limit(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(TierIOError, match="RLIMIT_FSIZE") as caught:
            StorageFile.create(tmp_path / "f", 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "f").exists()


def refuse(code: int) -> object:
    def call(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_no_preallocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files.os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    with StorageFile.create(tmp_path / "f", MIB) as file:
        assert os.fstat(file.fd).st_size == MIB
    assert "cannot be preallocated" in caplog.text


def test_o_direct_refused_by_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def call(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, mode))  # some kernels leave the file behind
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(files.os, "open", call)
    with StorageFile.create(tmp_path / "f", MIB) as file:
        assert not file.direct
    assert caplog.text.count("through the page cache") == 1


def test_o_direct_refused_by_the_first_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files.os, "preadv", refuse(errno.EINVAL))
    import fcntl

    with StorageFile.create(tmp_path / "f", MIB) as file:
        assert not file.direct
        assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert caplog.text.count("through the page cache") == 1


def test_remove(tmp_path: Path) -> None:
    file = StorageFile.create(tmp_path / "f", MIB)
    file.remove()
    file.remove()
    assert not (tmp_path / "f").exists()
