"""`Activity`: what this rank has posted and waits for, for its threads and for the watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.comm.deadlock import State
from tiermem.comm.messages import Kind, Message, Transfer
from tiermem.comm.stats import CommStats, Flow


@dataclass(frozen=True, slots=True)
class Blocked:
    """A thread that waits for ``transfer`` since ``since_ns`` (monotonic)."""

    transfer: Transfer
    since_ns: int


@dataclass(slots=True)
class _Open:
    """An exchange of which not everything is known to be complete."""

    transfers: tuple[Transfer, ...]  # complete ones too
    finished: int = 0


class Activity:
    """Any thread; the lock guards all of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[tuple[Kind, int], int] = {}  # exchanges posted, of each message
        self._open: dict[tuple[Kind, int, int], _Open] = {}
        self._blocked: dict[int, Blocked] = {}  # by thread
        self._actors: set[int] = set()  # threads that have posted
        self._stamp = 0  # grows with everything that happens
        self._flows = {kind: Flow() for kind in Kind}
        self._total = Flow()
        self._last = ""
        self.left = False  # set once
        self.failure: str | None = None  # why this run is over, once it is; set once

    def post(
        self, what: Message, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]
    ) -> tuple[list[Transfer], list[Transfer]]:
        """Numbers and counts an exchange of these (peer, bytes)."""
        with self._lock:
            key = (what.kind, what.index)
            number = self._numbers.get(key, 0)
            self._numbers[key] = number + 1
            self._actors.add(threading.get_ident())
            self._stamp += 1
            self._last = what.name
            going = [Transfer(what, number, peer, True, nbytes) for peer, nbytes in sends]
            coming = [Transfer(what, number, peer, False, nbytes) for peer, nbytes in receives]
            if going or coming:
                self._open[what.kind, what.index, number] = _Open((*going, *coming))
            for flow in (self._flows[what.kind], self._total):
                flow.post(sum(t.nbytes for t in going), sum(t.nbytes for t in coming))
        return going, coming

    def block(self, transfer: Transfer) -> None:
        """The calling thread begins to wait for ``transfer``."""
        with self._lock:
            self._stamp += 1
            self._blocked[threading.get_ident()] = Blocked(transfer, time.monotonic_ns())

    def unblock(self, finished: Transfer | None) -> None:
        """The calling thread waits no more; ``finished`` is what is complete now."""
        with self._lock:
            self._stamp += 1
            self._blocked.pop(threading.get_ident(), None)
            if finished is not None:
                self._finish(finished)

    def _finish(self, transfer: Transfer) -> None:
        key = (transfer.what.kind, transfer.what.index, transfer.number)
        self._open[key].finished += 1
        if self._open[key].finished == len(self._open[key].transfers):
            del self._open[key]
        for flow in (self._flows[transfer.what.kind], self._total):
            flow.finish(transfer.nbytes)

    def leave(self) -> None:
        """This rank posts nothing any more."""
        with self._lock:
            self.left = True

    def fail(self, failure: str) -> bool:
        """Notes why the run is over; False if that was known already."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
            return True

    def blocked(self) -> list[Blocked]:
        """What threads wait for now, the longest wait first."""
        with self._lock:
            return sorted(self._blocked.values(), key=lambda each: each.since_ns)

    def state(self, beat: int) -> State | None:
        """What others need to know if all threads of this rank that exchange are blocked, or if it
        has closed."""
        alive = {thread.ident for thread in threading.enumerate()}
        with self._lock:
            busy = not self._blocked or (self._actors & alive) - self._blocked.keys()
            if busy and not self.left:
                return None
            return State(
                stamp=self._stamp,
                beat=beat,
                waits=() if self.left else tuple(b.transfer for b in self._blocked.values()),
                posted=dict(self._numbers),
                open=tuple(transfer for each in self._open.values() for transfer in each.transfers),
            )

    def summary(self) -> tuple[int, str]:
        """How many exchanges were posted, and the name of the last."""
        with self._lock:
            return self._total.exchanges, self._last

    def stats(self) -> CommStats:
        with self._lock:
            by_kind = {kind: flow.reading() for kind, flow in self._flows.items()}
            return CommStats(by_kind, self._total.max_in_flight_bytes)
