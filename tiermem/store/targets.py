"""`Targets`: the places that pieces of records go to, host memory and the storage paths."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from tiermem.errors import IOContext, TierIOError
from tiermem.io.base import Engine, Move, Op, Priority, QueueOptions
from tiermem.io.files import free_bytes
from tiermem.store.pathfile import PathFile, check_file_limit
from tiermem.store.rundir import RunDirectory, check_paths
from tiermem.store.runs import Lane, start
from tiermem.store.stats import PathStats
from tiermem.store.striping import Piece
from tiermem.store.transfer import PieceRequest, Transfer
from tiermem.types import format_bytes

HOST_MEMORY = "host memory"
"""What stands for a path in errors about pieces that lie in host memory."""


class Targets:
    """Target ``i`` is the i-th path with its queue and run directory; the one after is host memory.

    Raises `ConfigError` that lists every path that cannot be used. Not thread safe: the store calls
    it under its lock.
    """

    def __init__(
        self, engine: Engine, paths: Sequence[Path], options: QueueOptions, *, direct: bool
    ) -> None:
        check_paths(paths)
        self._engine = engine
        self._run_bytes = options.chunk_bytes
        self._want_direct = direct
        self._directories: list[RunDirectory] = []
        self._files: dict[int, list[PathFile]] = {}  # by generation
        self._read_bytes = [0] * len(paths)
        self._written_bytes = [0] * len(paths)
        self.copied_bytes = 0
        try:
            for path in paths:
                self._directories.append(RunDirectory(path))
            self._generation(0)
            self._queues = [engine.add_queue(options) for _ in paths]  # may be refused: see aio-max-nr
        except BaseException:
            self.close()
            raise

    @property
    def num_paths(self) -> int:
        return len(self._directories)

    @property
    def direct(self) -> bool:
        """Whether every path's files bypass the page cache."""
        return all(file.direct for files in self._files.values() for file in files)

    def grow(self, generation: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """Preallocates ``sizes[i]`` bytes on path i; where they start. All of them or none.

        Raises `TierIOError` if a path is full.
        """
        files = self._generation(generation)
        before = [file.nbytes for file in files]
        try:
            return tuple(
                file.grow(size) if size else file.nbytes
                for file, size in zip(files, sizes, strict=True)
            )
        except BaseException:
            for file, nbytes in zip(files, before, strict=True):
                file.shrink(nbytes)
            raise

    def check_room(self, sizes: Sequence[int], total: int) -> None:
        """Raises `TierIOError` if path i cannot take ``sizes[i]`` bytes more, ``total`` in all. Paths
        on one filesystem share its room."""
        needed: dict[int, int] = {}
        for directory, size, file in zip(self._directories, sizes, self._generation(0), strict=True):
            device = os.stat(directory.path).st_dev
            needed[device] = needed.get(device, 0) + size
            free = free_bytes(directory.path)
            context = IOContext("preallocation", str(directory.path.parent), file.nbytes, size)
            if needed[device] > free:
                raise TierIOError(
                    errno.ENOSPC,
                    context,
                    f"{total} bytes ({format_bytes(total)}) are needed in all, {needed[device]} of "
                    f"them there, where {free} bytes ({format_bytes(free)}) are free; free space, add "
                    f"a path, give other path_weights, or keep more in host memory",
                )
            check_file_limit(context)

    def submit(
        self, op: Op, places: Sequence[tuple[Transfer, Sequence[Piece]]], terms: tuple[object, Priority]
    ) -> None:
        """Starts every piece of these transfers, those of one path by one call and neighbours as one.

        If it raises, the pieces started so far are in each transfer's ``requests``.
        """
        owner, priority = terms
        moves: list[list[Move]] = [[] for _ in self._directories]
        movers: list[list[Transfer]] = [[] for _ in self._directories]
        for transfer, pieces in places:
            record, base = transfer.record, transfer.address - transfer.start
            files = self._files[record.generation]
            for target, target_offset, record_offset, length in pieces:
                if target < len(files):
                    offset = record.bases[target] + target_offset
                    moves[target].append((files[target].fd, offset, base + record_offset, length))
                    movers[target].append(transfer)
                else:
                    piece = Piece(target, target_offset, record_offset, length)
                    self._submit_copy(transfer, piece, base + record_offset, owner)
        for target, some in enumerate(moves):
            if some:
                lane = Lane(self._engine, self._queues[target], op, owner, priority)
                requests = start(lane, some, self._run_bytes)
                for transfer, request, (_, offset, _, length) in zip(
                    movers[target], requests, some, strict=True
                ):
                    path = self._files[transfer.record.generation][target].path
                    transfer.requests.append(PieceRequest(request, target, path, offset, length))

    def count(self, op: Op, requests: Sequence[PieceRequest]) -> None:
        """These have succeeded."""
        for piece in requests:
            if piece.target >= self.num_paths:
                self.copied_bytes += piece.length
            elif op is Op.READ:
                self._read_bytes[piece.target] += piece.length
            else:
                self._written_bytes[piece.target] += piece.length

    def stats(self) -> tuple[PathStats, ...]:
        return tuple(
            PathStats(
                str(directory.path),
                sum(files[at].nbytes for files in self._files.values()),
                self._read_bytes[at],
                self._written_bytes[at],
                all(files[at].direct for files in self._files.values()),
            )
            for at, directory in enumerate(self._directories)
        )

    def close(self) -> None:
        """Closes and deletes the files. Nothing may be in flight. Idempotent."""
        with contextlib.ExitStack() as stack:  # every one is closed even if another fails
            for directory in self._directories:
                stack.callback(directory.close)
            for files in self._files.values():
                for file in files:
                    stack.callback(file.close)

    def _generation(self, generation: int) -> list[PathFile]:
        if generation not in self._files:
            files: list[PathFile] = []
            try:
                for directory in self._directories:
                    files.append(PathFile(directory.path, generation, direct=self._want_direct))
            except BaseException:
                for file in files:
                    file.close()
                raise
            self._files[generation] = files
        return self._files[generation]

    def _submit_copy(self, transfer: Transfer, piece: Piece, address: int, owner: object) -> None:
        block = transfer.record.block
        assert block is not None
        resident = block.address + piece.target_offset
        if resident == address:
            return  # the caller works in place (see TieredStore.view_address)
        source, destination = (resident, address) if transfer.op is Op.READ else (address, resident)
        request = self._engine.copy(destination, source, piece.length, owner=owner)
        transfer.requests.append(
            PieceRequest(request, piece.target, HOST_MEMORY, resident, piece.length)
        )
