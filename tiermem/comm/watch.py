"""`Watch`: a thread that finds out why nothing comes, and wakes who waits for it in vain."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping

import torch

from tiermem.comm.compat import Work
from tiermem.comm.deadlock import State, Suspicion, describe, describe_wait, follow
from tiermem.comm.link import SAME_CALLS, Link, describe_departure
from tiermem.comm.messages import Transfer
from tiermem.errors import StateError

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
_BUSY_PERIOD_S = 0.25  # while a thread waits for long, or the run is over
_LONG_WAIT_NS = 2_000_000_000
_WARN_NS = 15_000_000_000


class Watch:
    """[Note: waking] Nothing but its message, or the end of its peer, ends a blocked transfer. So when
    the run is over, the peers' watches end it: they send zeros of its size with its tag, or take what
    it sends. A rank asks for that only after it has noted the failure itself, which every wait looks
    at when it returns, so no filling is ever taken for data. To close one's connections would wake
    the peers too, but not if a child process (a DataLoader's, for instance) has inherited them;
    therefore a rank that closes goes on waking for a while."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stop = threading.Event()
        self._suspicion = Suspicion()
        self._published: State | None = None
        self._warned: Transfer | None = None
        self._warn_after_ns = _WARN_NS
        self._asked: list[Transfer] = []
        self._fillings: dict[tuple[int, Transfer], tuple[torch.Tensor, Work]] = {}
        self._thread = threading.Thread(target=self._run, name="tiermem-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent; must be done before the interpreter ends, since a thread that
        it ends in the middle of a call into the store takes the process down."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._fillings.clear()

    def _run(self) -> None:
        busy = False
        while not self._stop.wait(_BUSY_PERIOD_S if busy else _PERIOD_S):
            busy = self._look()

    def _look(self) -> bool:
        """One round; True if the next should be soon."""
        link = self._link
        assert link.board is not None
        if link.activity.failure is None and (failure := link.board.failure()) is not None:
            link.activity.fail(failure)
        if link.activity.failure is not None:
            self._wake()
            return True
        now = time.monotonic_ns()
        blocked = [each for each in link.activity.blocked() if now - each.since_ns > _LONG_WAIT_NS]
        if blocked:
            self._warn(blocked[0].transfer, now - blocked[0].since_ns)
        self._publish(link.activity.state(self._beat()) if blocked or link.activity.left else None)
        if self._published is not None and self._published.waits:
            self._suspect(self._published)
        return bool(blocked)

    def _beat(self) -> int:
        return 0 if self._published is None else self._published.beat + 1

    def _publish(self, state: State | None) -> None:
        assert self._link.board is not None
        if state is not None or self._published is not None:
            self._link.board.publish_state(state)
        self._published = state

    def _suspect(self, own: State) -> None:
        """Looks at the ranks that this one waits for, and at those that they wait for."""
        board = self._link.board
        assert board is not None
        states = {self._link.rank: own}
        missing = [each.peer for each in own.waits]
        while missing:
            rank = missing.pop()
            if rank not in states and (state := board.state(rank)) is not None:
                states[rank] = state
                missing.extend(each.peer for each in state.waits)
        ranks = self._suspicion.look(states)
        if self._link.rank in ranks:
            board.fail(self._accuse(states, follow(states, self._link.rank)))

    def _accuse(self, states: Mapping[int, State], ranks: list[int]) -> str:
        names = self._link.names
        last = ranks[-1]
        if not states[last].waits:
            assert self._link.board is not None
            departure = describe_departure(names[last], self._link.board.departure(last), None)
            return f"{departure} ({describe(states, ranks[:-1], names)})"
        return (
            f"ranks disagree about what comes next: {describe(states, ranks, names)}; all ranks must "
            "run the same modules in the same order, as often, and with the same shapes (look for "
            "branches, batches or loops that differ by rank; a module of whose parts each rank calls "
            "others, such as experts, is to be one unit: tiermem.shard(model, runtime, wrap=[its "
            f"class, ...])), and {SAME_CALLS}"
        )

    def _warn(self, transfer: Transfer, waited_ns: int) -> None:
        """After a while, and each time that takes twice as long: a slow rank is no error."""
        if transfer != self._warned:
            self._warned, self._warn_after_ns = transfer, _WARN_NS
        if waited_ns < self._warn_after_ns:
            return
        self._warn_after_ns = 2 * waited_ns
        names = self._link.names
        logger.warning(
            "%s %s, for %d s now; if that rank is not just slow: all ranks must %s",
            names[self._link.rank],
            describe_wait(transfer, names[transfer.peer]),
            waited_ns // 1_000_000_000,
            SAME_CALLS,
        )

    def _wake(self) -> None:
        """Asks to be woken, and wakes others; see [Note: waking]."""
        board = self._link.board
        assert board is not None
        asked = [each.transfer for each in self._link.activity.blocked()]
        if not asked:
            board.need_nobody()
        if asked != self._asked:
            board.ask_release(asked)
            self._asked = asked
        for rank in range(self._link.size):
            if rank == self._link.rank:
                continue
            for transfer in board.asked_release(rank):
                if transfer.peer == self._link.rank and (rank, transfer) not in self._fillings:
                    self._fill(rank, transfer)

    def _fill(self, rank: int, transfer: Transfer) -> None:
        filling = dataclasses.replace(transfer, peer=rank, sending=not transfer.sending)
        memory = torch.zeros(transfer.nbytes, dtype=torch.uint8)
        # If that fails the peer has gone, or this rank closes: both wake it as well.
        with contextlib.suppress(StateError):
            self._fillings[rank, transfer] = (memory, self._link.start(filling, memory))
