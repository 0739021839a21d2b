"""`Exchange`: one collective under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tiermem.comm.compat import Work
from tiermem.comm.link import Link
from tiermem.comm.messages import Transfer
from tiermem.errors import StateError


class Exchange:
    """Transfers between this rank and the others. Waited for by one thread at a time. It holds its
    tensors until all of it has been waited for: the network may write to them until then."""

    __slots__ = ("_abandoned", "_coming", "_going", "_link", "_posted", "_taker", "_tensors")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._coming: list[tuple[Transfer, Work]] = []
        self._going: list[tuple[Transfer, Work]] = []
        self._tensors: list[Tensor] = []
        self._abandoned = False
        self._posted = False
        self._taker: _Taker | None = None

    def post(
        self, coming: Sequence[tuple[Transfer, Tensor]], going: Sequence[tuple[Transfer, Tensor]]
    ) -> None:
        """Starts these transfers; receives first, so that what comes finds its place."""
        self._tensors += [tensor for _, tensor in [*coming, *going]]
        for transfer, tensor in coming:
            self._coming.append((transfer, self._link.start(transfer, tensor)))
        for transfer, tensor in going:
            self._going.append((transfer, self._link.start(transfer, tensor)))
        self._posted = True

    def wait_received(self) -> None:
        """Returns when everything that comes is there.

        :raises RankError: a peer died, failed, left, or does something else; with the cause. The
            receiving tensors' contents are then undefined.
        """
        with self._counted():
            self._take()
            self._wait(self._coming)

    def received_within(self, seconds: float) -> bool:
        """Whether everything that comes is there, perhaps after some ``seconds``, or will never be:
        then `wait_received` returns, or raises, at once. gloo cannot be asked, so that a thread has to
        wait for it."""
        if not self._coming:
            return True
        if self._taker is None:
            self._taker = _Taker(self._link, self._coming[0][0], lambda: self._wait(self._coming))
        with self._counted():
            return self._taker.over.wait(seconds)

    def over_within(self, seconds: float) -> bool:
        """Whether all of it is over, perhaps after some ``seconds``: then `wait` returns, or raises, at
        once. As `received_within`."""
        with self._counted():
            if self._taker is not None:
                if not self._taker.over.wait(seconds):
                    return False
                self._take()
            if self.done:
                return True
            first = (self._coming or self._going)[0][0]
            self._taker = _Taker(self._link, first, self._wait_for_all)
            return self._taker.over.wait(seconds)

    def wait(self) -> None:
        """Returns when everything that comes is there, and what goes may be overwritten. Raises as
        `wait_received`."""
        with self._counted():
            self._take()
            self._wait_for_all()
        self._tensors = []

    @contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._link.waited_seconds += time.perf_counter() - started

    def _wait_for_all(self) -> None:
        self._wait(self._coming)
        self._wait(self._going)

    @property
    def done(self) -> bool:
        """Whether all of it has been waited for."""
        return self._posted and not self._coming and not self._going

    def abandon(self) -> None:
        """Lets go of the connections; what is not complete now never will be."""
        self._abandoned = not self.done
        self._coming, self._going = [], []

    def _take(self) -> None:
        """Waits for the thread that waits, if there is one."""
        if self._taker is not None:
            self._taker.join()
            self._taker = None

    def _wait(self, transfers: list[tuple[Transfer, Work]]) -> None:
        if self._abandoned:
            raise StateError(
                "the communicator was closed before this exchange was complete: wait first"
            )
        while transfers:
            self._link.wait(*transfers[0])
            transfers.pop(0)


class _Taker:
    """A thread that waits for what comes. ``over``: it waits no more. The thread that joins it counts
    as blocked by ``first`` meanwhile, so that ranks in a deadlock are found out all the same."""

    def __init__(self, link: Link, first: Transfer, wait: Callable[[], None]) -> None:
        self.over = threading.Event()
        self._link = link
        self._first = first
        self._wait = wait
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="tiermem-taker", daemon=True).start()

    def _run(self) -> None:
        try:
            self._wait()
        except Exception as error:
            self._error = error
        finally:
            self.over.set()

    def join(self) -> None:
        """Returns when it is over; raises its error."""
        if not self.over.is_set():
            self._link.activity.block(self._first)
            try:
                self.over.wait()
            finally:
                self._link.activity.unblock(None)
        if self._error is not None:
            raise self._error
