"""`Transfer`: one asynchronous read or write of a range of a record."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from tiermem.errors import IOContext, TierIOError
from tiermem.io.base import Op, Request
from tiermem.store.records import RecordSpan
from tiermem.store.runs import Part


class PieceRequest(NamedTuple):
    """One piece under way. ``target`` is the path's number, or the number of paths for host memory;
    ``path`` and ``offset`` are what an error says."""

    request: Request | Part
    target: int
    path: Path | str
    offset: int
    length: int


class Keeper(Protocol):
    """What a transfer needs of its store."""

    def settle(self, transfer: Transfer) -> None:
        """Waits for ``transfer``, then brings its record up to date, once."""

    def reported(self, transfer: Transfer) -> None:
        """The failure of ``transfer`` has been raised to somebody."""


class Transfer:
    """In flight from the moment it is made; holds ``owner`` until it has completed.

    Completion is noticed by whoever looks first (`done`, `wait`, a conflicting transfer, the store's
    `reap`); the record's state is then settled exactly once, under the store's lock.
    """

    __slots__ = (
        "_keeper",
        "_owner",
        "_requests",
        "address",
        "error",
        "nbytes",
        "op",
        "record",
        "reported",
        "settled",
        "start",
        "stop",
    )

    def __init__(
        self,
        op: Op,
        span: RecordSpan,
        owner: object,
        keeper: Keeper,
    ) -> None:
        self.record, self.start, self.stop, self.address = span
        self.op = op
        self.nbytes = self.stop - self.start
        self.error: TierIOError | None = None
        """The failure of the first failed piece, once settled."""
        self.settled = False
        self.reported = False
        """Whether its failure has been raised to somebody."""
        self._requests: list[PieceRequest] = []
        self._owner = owner
        self._keeper = keeper

    @property
    def requests(self) -> list[PieceRequest]:
        return self._requests

    def conflicts(self, op: Op, start: int, stop: int) -> bool:
        """Whether a transfer of [start, stop) must come after this one."""
        overlap = start < self.stop and self.start < stop
        return overlap and (op is Op.WRITE or self.op is Op.WRITE)

    def done(self) -> bool:
        """Whether it has completed, well or not. Never blocks on I/O."""
        if self.settled:
            return True
        if not all(piece.request.done() for piece in self._requests):
            return False
        self.complete()
        return True

    def complete(self) -> None:
        """Blocks until all of it has completed. Raises nothing: see ``error``."""
        if not self.settled:
            self._keeper.settle(self)

    def wait(self) -> None:
        """Blocks until all of it has completed; raises the `TierIOError` of the first failed piece.

        Even then no piece is in flight any more: the buffer is free. Calling it again gives the same
        result.
        """
        self.complete()
        if self.error is not None:
            self.reported = True
            self._keeper.reported(self)
            raise self.error

    def collect(self) -> TierIOError | None:
        """Reads every piece's result (blocking); the first failure. For the store."""
        first: TierIOError | None = None
        for piece in self._requests:  # all of them, before the failure is told
            try:
                piece.request.wait()
            except OSError as error:
                first = first or _failure(self, piece, error)
        return first

    def finish(self, error: TierIOError | None) -> object:
        """Settled; the owner, for the caller to drop. For the store, under its lock.

        The last reference to a buffer may run finalizers: they must not find the store locked.
        """
        self.error = error
        # Other threads look at ``settled`` without the lock, so the error must be there first.
        self.settled = True
        self._requests = []
        owner, self._owner = self._owner, None
        return owner


def _failure(transfer: Transfer, piece: PieceRequest, error: OSError) -> TierIOError:
    number = error.errno or errno.EIO
    operation = "write" if transfer.op is Op.WRITE else "read"
    context = IOContext(operation, str(piece.path), piece.offset, piece.length, transfer.record.name)
    detail = error.strerror or str(error)
    failure = TierIOError(number, context, "" if detail == os.strerror(number) else detail)
    failure.__cause__ = error
    return failure


def enter(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Puts each among its record's in flight, or none of them: what it must come after is returned.

    Raises ValueError for transfers that conflict with each other.
    """
    entered: set[Transfer] = set()
    conflicts: list[Transfer] = []
    try:
        for transfer in transfers:
            in_flight = transfer.record.in_flight
            for other in in_flight:
                if other.conflicts(transfer.op, transfer.start, transfer.stop):
                    if other in entered:
                        raise ValueError(
                            f"two of the transfers are of overlapping parts of record "
                            f"{transfer.record.name}: [{other.start}, {other.stop}) and "
                            f"[{transfer.start}, {transfer.stop}); start one after the other"
                        )
                    conflicts.append(other)
            in_flight.append(transfer)
            entered.add(transfer)
    except ValueError:
        conflicts = list(entered)  # to be undone
        raise
    finally:
        if conflicts:
            for transfer in entered:
                transfer.record.in_flight.remove(transfer)
    return conflicts
