"""`Exchange`: one collective under way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tiermem.comm.compat import Work
from tiermem.comm.link import Link
from tiermem.comm.messages import Transfer
from tiermem.errors import StateError


class Exchange:
    """Transfers between this rank and the others. Waited for by one thread at a time. It holds its
    tensors until all of it has been waited for: the network may write to them until then."""

    __slots__ = ("_abandoned", "_coming", "_going", "_link", "_posted", "_tensors")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._coming: list[tuple[Transfer, Work]] = []
        self._going: list[tuple[Transfer, Work]] = []
        self._tensors: list[Tensor] = []
        self._abandoned = False
        self._posted = False

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
        self._wait(self._coming)

    def wait(self) -> None:
        """Returns when everything that comes is there, and what goes may be overwritten. Raises as
        `wait_received`."""
        self._wait(self._coming)
        self._wait(self._going)
        self._tensors = []

    @property
    def done(self) -> bool:
        """Whether all of it has been waited for."""
        return self._posted and not self._coming and not self._going

    def abandon(self) -> None:
        """Lets go of the connections; what is not complete now never will be."""
        self._abandoned = not self.done
        self._coming, self._going = [], []

    def _wait(self, transfers: list[tuple[Transfer, Work]]) -> None:
        if self._abandoned:
            raise StateError(
                "the communicator was closed before this exchange was complete: wait first"
            )
        while transfers:
            self._link.wait(*transfers[0])
            transfers.pop(0)
