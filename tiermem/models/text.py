"""Bytes of text files as training data, read as they are needed."""

from __future__ import annotations

import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from tiermem.errors import ConfigError


def default_files() -> list[Path]:
    """The Python standard library's own source files on this machine, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = ("site-packages", "dist-packages", "test", "tests", "__pycache__")
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not set(skipped) & set(path.relative_to(root).parts) and path.is_file()
    ]


def expand_files(sources: Sequence[Path]) -> list[Path]:
    """Every file named and every file below each directory named; sorted, each once.

    Hidden files and directories below a named directory are left out. Raises `ConfigError` that
    lists all that does not exist.
    """
    missing = [str(source) for source in sources if not source.exists()]
    if missing:
        raise ConfigError(f"no such file or directory: {', '.join(missing)}")
    found: set[Path] = set()
    for source in sources:
        if source.is_dir():
            found.update(
                path for path in source.rglob("*") if path.is_file() and _visible(path, source)
            )
        else:
            found.add(source)
    return sorted(found)


def _visible(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts)


class ByteText:
    """The bytes of files, one after the other, as one sequence; only slices are ever read."""

    def __init__(self, sources: Sequence[Path] = ()) -> None:
        files = expand_files(sources) if sources else default_files()
        try:
            sized = [(path, path.stat().st_size) for path in files]
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
        self._files = [path for path, size in sized if size]
        self._ends = list(accumulate(size for _, size in sized if size))
        if not self._files:
            where = ", ".join(map(str, sources)) or "the Python standard library"
            raise ConfigError(f"no text in {where}: nothing but empty files")

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def num_files(self) -> int:
        """How many files have any text."""
        return len(self._files)

    def read(self, start: int, length: int) -> bytes:
        """``length`` bytes from ``start`` on, across file bounds."""
        pieces: list[bytes] = []
        index = bisect_right(self._ends, start)
        while length > 0:
            begin = self._ends[index - 1] if index else 0
            piece = self._read_file(
                self._files[index], start - begin, min(length, self._ends[index] - start)
            )
            pieces.append(piece)
            start += len(piece)
            length -= len(piece)
            index += 1
        return b"".join(pieces)

    @staticmethod
    def _read_file(path: Path, offset: int, length: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                piece = file.read(length)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        if len(piece) != length:
            raise ConfigError(
                f"{path} has become shorter since the start; leave it alone while training"
            )
        return piece

    def batches(
        self, batch_size: int, length: int, seed: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless (tokens, targets), each int64 of (batch_size, length); the same for the same seed.

        Targets are the tokens shifted by one. Raises `ConfigError` where the text is too short.
        """
        if len(self) < length + 1:
            raise ConfigError(
                f"the text has {len(self)} bytes; a sequence of {length} needs at least {length + 1}: "
                "give more text or a smaller --sequence-length"
            )
        return self._batches(batch_size, length, seed)

    def _batches(
        self, batch_size: int, length: int, seed: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self) - length, (batch_size,), generator=generator)
            rows = [bytearray(self.read(start, length + 1)) for start in starts.tolist()]
            window = torch.stack([torch.frombuffer(row, dtype=torch.uint8) for row in rows]).long()
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
