"""`Run`: one request of the engine for pieces that are neighbours on a path and in memory.

[Note: neighbours] Small records that follow each other in a file, moved to or from memory in the same
order, are one request, up to a chunk of the queue: the cost of a transfer is then paid once. If it
fails, the engine does not know at which of them, so each is moved again by itself and its own result
counts: a bad block is told to the record that has it, and to no other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tiermem.io.base import Engine, Move, Op, Priority, Request


@dataclass(frozen=True, slots=True)
class Lane:
    """How the pieces of one batch reach one path: ``owner`` is held by every request."""

    engine: Engine
    queue: int
    op: Op
    owner: object
    priority: Priority

    def submit(self, moves: Sequence[Move]) -> Sequence[Request]:
        return self.engine.submit_many(
            self.queue, self.op, moves, owner=self.owner, priority=self.priority
        )


@dataclass(slots=True)
class Run:
    """The moves that ``request`` makes in one go; see [Note: neighbours]."""

    lane: Lane
    moves: Sequence[Move]
    request: Request
    well: bool = False
    """The request was seen to have succeeded; never taken back."""
    _own: Sequence[Request] | None = None  # after a failure; guarded by _lock
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def teller(self, at: int) -> Request:
        """What tells how move ``at`` ended: the common request, or after its failure the move's own.
        Never blocks on I/O."""
        if not self.request.done():
            return self.request
        with self._lock:  # against two threads that both move it again
            if self._own is None and not self.well:
                try:
                    self.request.wait()
                    self.well = True
                except OSError:
                    self._own = self.lane.submit(self.moves)
            return self.request if self._own is None else self._own[at]


class Part:
    """The move ``at`` of a run: to the waiting side, a request like any other."""

    __slots__ = ("_at", "_run")

    def __init__(self, run: Run, at: int) -> None:
        self._run = run
        self._at = at

    def done(self) -> bool:
        """Whether it has completed, well or not. Never blocks on I/O."""
        return self._run.teller(self._at).done()

    def wait(self) -> None:
        """Blocks until complete; raises OSError for this move alone."""
        run = self._run
        if run.well:
            return
        with contextlib.suppress(OSError):  # the teller knows what that means for this move
            run.request.wait()
        run.teller(self._at).wait()


def start(lane: Lane, moves: Sequence[Move], limit_bytes: int) -> list[Request | Part]:
    """Starts ``moves``, neighbours together up to ``limit_bytes``; for each what tells its end."""
    groups = list(_grouped(moves, limit_bytes))
    requests = lane.submit([_joined(group) for group in groups])
    started: list[Request | Part] = []
    for group, request in zip(groups, requests, strict=True):
        if len(group) == 1:
            started.append(request)
        else:
            run = Run(lane, group, request)
            started.extend(Part(run, at) for at in range(len(group)))
    return started


def _joined(group: Sequence[Move]) -> Move:
    fd, offset, address, length = group[0]
    return (fd, offset, address, length if len(group) == 1 else sum(move[3] for move in group))


def _grouped(moves: Sequence[Move], limit_bytes: int) -> Iterator[list[Move]]:
    group: list[Move] = []
    expected, total = (-1, -1, -1), 0
    for move in moves:
        fd, offset, address, length = move
        if group and (fd, offset, address) == expected and total + length <= limit_bytes:
            group.append(move)
            total += length
        else:
            if group:
                yield group
            group, total = [move], length
        expected = (fd, offset + length, address + length)
    if group:
        yield group
