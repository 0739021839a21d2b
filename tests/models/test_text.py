"""Training data are exactly the bytes of the files, the same for the same seed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from tiermem.errors import ConfigError
from tiermem.models.text import ByteText, default_files, expand_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.txt").write_bytes(b"bbbb")
    (tmp_path / "a.txt").write_bytes(b"aaa")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "sub" / "c.txt").write_bytes(b"cc")
    (tmp_path / ".hidden" / "d.txt").write_bytes(b"dd")
    return tmp_path


def test_files_are_joined_in_order(folder: Path) -> None:
    text = ByteText([folder])
    assert (len(text), text.num_files) == (9, 3)
    whole = b"aaabbbbcc"
    for start in range(9):
        for length in range(10 - start):
            assert text.read(start, length) == whole[start : start + length]


def test_a_file_named_twice_counts_once(folder: Path) -> None:
    assert expand_files([folder / "b.txt", folder, folder / "b.txt"]) == expand_files([folder])


def test_batches_are_deterministic_and_shifted_by_one(folder: Path) -> None:
    first, second = (list(islice(ByteText([folder]).batches(4, 5, seed=7), 6)) for _ in range(2))
    for (tokens, targets), (again, _) in zip(first, second, strict=True):
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.shape == targets.shape == (4, 5)
        assert torch.equal(tokens, again)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        for row in tokens:
            assert bytes(row.tolist()) in b"aaabbbbcc"
    other = next(ByteText([folder]).batches(64, 5, seed=8))[0]
    assert not torch.equal(next(ByteText([folder]).batches(64, 5, seed=7))[0], other)


def test_every_position_can_be_drawn(folder: Path) -> None:
    tokens, _ = next(ByteText([folder]).batches(200, 7))
    assert {bytes(row.tolist()) for row in tokens} == {b"aaabbbb", b"aabbbbc"}


def test_missing_files_are_all_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file or directory: .*one, .*two"):
        ByteText([folder / "one", folder, folder / "two"])


def test_nothing_but_empty_files(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nothing but empty files"):
        ByteText([folder / "empty.txt"])


def test_too_short_a_text_is_refused_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"9 bytes; a sequence of 9 needs at least 10"):
        ByteText([folder]).batches(1, 9)
    assert next(ByteText([folder]).batches(1, 8))[0].shape == (1, 8)


def test_default_is_the_standard_library() -> None:
    files = default_files()
    assert files == sorted(files)
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)
