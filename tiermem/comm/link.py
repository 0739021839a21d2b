"""`Link`: the connections of one rank, what it knows of the others, and why a wait failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from torch import Tensor

from tiermem.comm.activity import Activity
from tiermem.comm.board import Board, Departure
from tiermem.comm.compat import Transport, Work
from tiermem.comm.deadlock import describe_wait
from tiermem.comm.messages import Transfer
from tiermem.errors import RankError, StateError

# A slow peer is not an error, and a wait that runs out would break the connection.
_FOR_EVER = timedelta(days=365)

SAME_CALLS = (
    "make the same calls of what needs all of them (a forward, clip_grad_norm_(), state_dict() and its "
    "values, optimizer.state, full_param(), gathered(), printing a parameter): look for `if rank == 0`"
)


@dataclass(slots=True)
class Link:
    """Shared by a communicator, its exchanges and its watch."""

    rank: int
    size: int
    names: dict[int, str]  # what rank r of the group is called: "rank 5", by the default group
    activity: Activity
    board: Board | None  # None: one rank
    transport: Transport | None  # None: one rank, or closed
    waited_seconds: float = 0.0  # in exchanges' waits; whoever waits adds to it
    dead: set[int] = field(default_factory=set)  # ranks that are gone and have not said why; grows

    def start(self, transfer: Transfer, tensor: Tensor) -> Work:
        """Starts ``transfer`` from or to ``tensor``."""
        transport = self.transport
        if transport is None:
            raise StateError(f"{transfer.what} after close(): open a new communicator")
        try:
            if transfer.sending:
                return transport.send([tensor], transfer.peer, transfer.tag)
            return transport.recv([tensor], transfer.peer, transfer.tag)
        except RuntimeError as error:
            raise self.explain(transfer, error) from error

    def wait(self, transfer: Transfer, work: Work) -> None:
        """Waits until ``transfer`` is complete, or raises `RankError` with the cause."""
        if self.activity.failure is not None:
            raise self.failed(transfer)
        finished = None
        try:
            self.activity.block(transfer)
            if not work.is_completed():  # it is if Ctrl-C came between an earlier wait and its note
                work.wait(_FOR_EVER)
            finished = transfer
        except RuntimeError as error:
            raise self.explain(transfer, error) from error
        finally:
            self.activity.unblock(finished)
        if self.activity.failure is not None:  # what came may be a filling: [Note: waking]
            raise self.failed(transfer)

    def failed(self, transfer: Transfer | None = None) -> RankError:
        """The known failure as an error."""
        waited = ""
        if transfer is not None:
            peer = self.names[transfer.peer]
            waited = f"{self.names[self.rank]} {describe_wait(transfer, peer)}"
        if not waited or waited in str(self.activity.failure):
            return RankError(f"{self.activity.failure}")
        return RankError(f"{self.activity.failure} ({waited})")

    def explain(self, transfer: Transfer, error: Exception) -> RankError:
        """Why the connection to the peer of ``transfer`` is broken."""
        assert self.board is not None
        failure = self.board.failure()
        departure = self.board.departure(transfer.peer)
        if departure is None:
            self.dead.add(transfer.peer)
        if failure is None:
            failure = describe_departure(self.names[transfer.peer], departure, error)
        self.activity.fail(failure)
        return self.failed(transfer)


def describe_departure(peer: str, departure: Departure | None, error: Exception | None) -> str:
    """How ``peer`` left; ``departure`` is what it said, and ``error`` the connection's."""
    if departure is None:
        return (
            f"{peer} died without a word (killed, perhaps for memory, or its machine is gone): see "
            f"its own output and the kernel's log; the connection said: {error}"
        )
    last = f", last: {departure.last}" if departure.last else ""
    after = f"after {departure.exchanges} exchanges{last}"
    said = f": {departure.said}" if departure.said else ""
    if departure.how == "closed":
        return (
            f"{peer} closed its runtime {after}, while others go on: all ranks must run the same "
            f"number of steps, and {SAME_CALLS}"
        )
    if departure.how == "ended":
        return (
            f"{peer} ended its process without closing its runtime, {after}{said}; use the runtime in "
            "a with statement, or close() it"
        )
    return f"{peer} failed {after}{said}; see its own output"


def describe_error(error: BaseException) -> str:
    """As other ranks are told of it."""
    return f"{type(error).__name__}: {error}"
