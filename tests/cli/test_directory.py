"""Without --path, states go to a directory of the user's own on a drive."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tiermem.cli import directory
from tiermem.errors import ConfigError
from tiermem.store.mounts import find_mount


def test_default_is_private_and_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(directory, "in_memory", lambda path: False)
    made = directory.default_directory()
    assert made.parent == tmp_path
    assert made.stat().st_mode & 0o777 == 0o700
    assert directory.default_directory() == made


def test_a_temporary_directory_in_memory_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(directory, "in_memory", lambda path: path != here)
    assert directory.default_directory().parent == here


def test_a_directory_of_someone_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(directory, "in_memory", lambda path: False)
    directory.default_directory()
    made = next(tmp_path.iterdir())
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    made.rename(tmp_path / f"tiermem-{real + 1}")
    with pytest.raises(ConfigError, match="belongs to another user"):
        directory.default_directory()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_tmpfs_is_seen() -> None:
    if find_mount(Path("/dev/shm")).filesystem != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    assert directory.in_memory(Path("/dev/shm/below"))
