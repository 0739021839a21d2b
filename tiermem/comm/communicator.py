"""`Communicator`: collectives among the ranks of a group, as exchanges of tagged messages."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType

import torch
from torch import Tensor
from torch import distributed as dist

from tiermem.comm import compat
from tiermem.comm.activity import Activity
from tiermem.comm.board import Board, Departure
from tiermem.comm.exchange import Exchange
from tiermem.comm.link import Link, describe_error
from tiermem.comm.meeting import OPEN_S, meet
from tiermem.comm.messages import MAX_INDEX, Kind, Message
from tiermem.comm.stats import CommStats
from tiermem.comm.watch import Watch
from tiermem.errors import RankError, StateError

logger = logging.getLogger(__name__)

_CLOSE_S = 6.0  # for all ranks to close, or to learn of a failure
_POLL_S = 0.02


class Communicator:
    """Exchanges between the ranks of one group. Made by `open_communicator` or `single`.

    ``rank`` and ``size`` are those of the group. Any thread may use it, for different messages.
    """

    def __init__(self, link: Link, watch: Watch | None) -> None:
        self.rank = link.rank
        self.size = link.size
        self._link = link
        self._watch = watch
        self._lock = threading.Lock()
        self._open: list[Exchange] = []  # those not known to be done
        self._said: str | None = None  # what fail() was told
        self._closed = False
        self._farewell = weakref.finalize(self, _farewell, link, watch, os.getpid())

    def exchange(
        self, what: Message, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]
    ) -> Exchange:
        """Starts sending ``sends[r]`` to each rank r and receiving ``receives[r]`` from it; None, an
        empty tensor, and the own rank's element mean nothing. Returns at once.

        Contiguous tensors in host memory, of any dtype. What one rank sends and what the other
        receives must have the same size in bytes. All ranks that have something for each other must
        post the exchanges of one message in the same order; different messages may be in any order.

        :raises RankError: the run is over, since a rank failed or left.
        :raises StateError: the communicator is closed, or a tensor cannot be sent.
        """
        self.check()
        if self._closed:
            raise StateError(f"{what} after close(): open a new communicator")
        if not 0 <= what.index <= MAX_INDEX:
            raise StateError(f"{what} has index {what.index}, above {MAX_INDEX}: use larger groups")
        outgoing = self._others(what, sends)
        incoming = self._others(what, receives)
        going, coming = self._link.activity.post(
            what,
            [(peer, tensor.nbytes) for peer, tensor in outgoing],
            [(peer, tensor.nbytes) for peer, tensor in incoming],
        )
        exchange = Exchange(self._link)
        with self._lock:
            self._open = [each for each in self._open if not each.done]
            self._open.append(exchange)
        exchange.post(
            [(transfer, tensor) for transfer, (_, tensor) in zip(coming, incoming, strict=True)],
            [(transfer, tensor) for transfer, (_, tensor) in zip(going, outgoing, strict=True)],
        )
        return exchange

    def share_first(self, what: Message, tensor: Tensor) -> None:
        """The first rank's ``tensor`` (contiguous, of one size everywhere) on all ranks. Waits."""
        first = self.rank == 0
        sends = [tensor if first else None] * self.size
        receives = [None if first else tensor, *[None] * (self.size - 1)]
        self.exchange(what, sends, receives).wait()

    def gather_values(self, name: str, values: Sequence[float]) -> list[tuple[float, ...]]:
        """Every rank's ``values`` (as many on each), in rank order; exact in fp64. Waits for
        all ranks, unless there are no values."""
        own = torch.tensor(values, dtype=torch.float64)
        rows = torch.empty(self.size, len(values), dtype=torch.float64)
        rows[self.rank] = own
        exchange = self.exchange(Message(Kind.VALUES, 0, name), [own] * self.size, list(rows))
        exchange.wait()
        return [tuple(row) for row in rows.tolist()]

    def gather_texts(self, name: str, text: str) -> list[str]:
        """Every rank's ``text``, in rank order. Waits for all ranks."""
        own = torch.frombuffer(bytearray(text.encode() + b"."), dtype=torch.uint8)  # never empty
        sizes = self.gather_values(name, [own.numel()])
        parts = [torch.empty(int(size), dtype=torch.uint8) for (size,) in sizes]
        parts[self.rank] = own
        self.exchange(Message(Kind.VALUES, 1, name), [own] * self.size, parts).wait()
        return [bytes(part.tolist()).decode()[:-1] for part in parts]

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks why the run is over; only the first call does. They raise in their
        next `check`, `exchange` or wait, and are woken where they wait for this rank."""
        with self._lock:
            if self._said is not None or self._closed:
                return
            if isinstance(error, RankError):
                self._said = self._link.activity.failure or str(error)
            else:
                self._said = describe_error(error)
        if isinstance(error, RankError):
            self._tell(self._said)
        else:
            self._tell(f"{self._link.names[self.rank]} failed: {self._said}; see its own output")

    def _tell(self, failure: str) -> None:
        if self._link.board is not None:
            self._link.board.fail(failure)
        self._link.activity.fail(failure)

    @property
    def names(self) -> dict[int, str]:
        """What each rank of the group is called, by the default group's numbers: ``rank 5``."""
        return self._link.names

    def check(self) -> None:
        """Raises `RankError` if the run is known to be over. Costs nothing."""
        if self._link.activity.failure is not None:
            raise self._link.failed()

    def stats(self) -> CommStats:
        """The counters now."""
        return self._link.activity.stats()

    @property
    def waited_seconds(self) -> float:
        """How long its exchanges were waited for so far."""
        return self._link.waited_seconds

    def close(self, *, failed: bool = False) -> None:
        """Leaves the group. Idempotent; never raises because of other ranks.

        Waits for the own exchanges and then up to some seconds for the other ranks to close as well.
        With ``failed`` it does not wait for exchanges, but up to some seconds for the others to have
        read what `fail` said.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unfinished = list(self._open)
        self._farewell.detach()
        if self._link.board is None:
            return
        failed = failed or not self._drain(unfinished)
        if failed and self._said is None:
            name = self._link.names[self.rank]
            self._tell(
                self._link.activity.failure or f"{name} stopped without saying why; see its output"
            )
        self._leave(self._link.board, failed)
        if self._watch is not None:
            self._watch.stop()
        self._link.board.need_nobody()
        self._link.transport = None
        for exchange in unfinished:
            exchange.abandon()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close(failed=error is not None)

    def _others(self, what: Message, tensors: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        if len(tensors) != self.size:
            raise StateError(f"{what}: {len(tensors)} tensors for {self.size} ranks")
        others = []
        for peer, tensor in enumerate(tensors):
            if tensor is None or peer == self.rank or tensor.nbytes == 0:
                continue
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise StateError(
                    f"{what}: a tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()} on "
                    f"{tensor.device} cannot be exchanged: copy it to contiguous host memory"
                )
            others.append((peer, tensor))
        return others

    def _drain(self, exchanges: list[Exchange]) -> bool:
        for exchange in exchanges:
            try:
                exchange.wait()
            except RankError as error:
                logger.warning("closing with unfinished exchanges: %s", error)
                return False
        return True

    def _leave(self, board: Board, failed: bool) -> None:
        """Says so, and stays until the others need this rank no more."""
        activity = self._link.activity
        activity.leave()
        exchanges, last = activity.summary()
        said = self._said or activity.failure or ""
        board.leave(Departure("failed" if failed else "closed", said, exchanges, last))
        board.publish_state(activity.state(0))
        end = time.monotonic() + _CLOSE_S
        while time.monotonic() < end:
            if failed or activity.failure is not None:
                count, enough = board.num_seen(), self.size - len(self._link.dead)
            else:
                count, enough = board.num_left(), self.size
            if count is None or count >= enough:
                return
            time.sleep(_POLL_S)


def _farewell(link: Link, watch: Watch | None, process: int) -> None:
    """The process ends, or the communicator was dropped, without close()."""
    if os.getpid() != process:  # a forked child, which is no rank
        return
    if watch is not None:
        watch.stop()
    if link.board is not None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        said = "" if error is None else describe_error(error)
        with contextlib.suppress(Exception):
            link.board.leave(Departure("ended", said, *link.activity.summary()))
    link.transport = None


def single() -> Communicator:
    """A communicator of one rank, without torch.distributed: nothing moves."""
    return Communicator(Link(0, 1, {0: "rank 0"}, Activity(), None, None), None)


def open_communicator(group: dist.ProcessGroup | None, run: int = 0) -> Communicator:
    """A communicator over the ranks of ``group`` (None: the default group), on connections of its
    own. Collective: waits for all ranks. ``run`` is a number that ranks agree on; what one of them has
    refused to open for it (`refuse_to_open`), nobody waits for.

    :raises RankError: the others did not come in time, or one of them has refused.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise StateError("torch.distributed is not initialized: call dist.init_process_group first")
    rank, size = group.rank(), group.size()
    if size == 1:
        return single()
    names = _names_of(group)
    store, number = meet(group, names, run)
    try:
        transport = compat.open_gloo(store, rank, size, timedelta(seconds=OPEN_S))
    except RuntimeError as error:
        raise RankError(
            f"{names[rank]}: {', '.join(names.values())} did not all open communicator {number} of "
            f"their group within {OPEN_S} s: all ranks must make the same runtimes; {error}"
        ) from error
    link = Link(rank, size, names, Activity(), Board(store, rank), transport)
    watch = Watch(link)
    watch.start()
    return Communicator(link, watch)


def _names_of(group: dist.ProcessGroup) -> dict[int, str]:
    return {at: f"rank {each}" for at, each in enumerate(dist.get_process_group_ranks(group))}
