"""Groups on their way between host memory and an accelerator.

[Note: staging] Storage reads into pinned host memory, the image of a group; from there it is copied
to the group's lease asynchronously. An update works on the image too. Its memory comes back when the
copy and the write-backs that read it are done. Without an accelerator a lease is host memory itself
and none of this happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tiermem.errors import BudgetError
from tiermem.memory.arena import Arena, Block
from tiermem.memory.lease import tensor_over
from tiermem.store.transfer import Transfer
from tiermem.types import Purpose, format_bytes, round_up

if TYPE_CHECKING:
    from tiermem.zero.group import ParamGroup


@dataclass(slots=True)
class _Retiring:
    """Host memory that a copy to an accelerator and write-backs still read."""

    block: Block
    event: torch.Event | None
    writes: Sequence[Transfer]

    def finished(self) -> bool:
        return (self.event is None or self.event.query()) and all(w.done() for w in self.writes)

    def finish(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        for write in self.writes:  # their errors are for whoever owns them
            write.complete()


class HostImages:
    """See [Note: staging]. Training thread only."""

    def __init__(self, host: Arena, wait_for_release: Callable[[], bool]) -> None:
        self._host = host
        self._wait_for_release = wait_for_release
        self._images: dict[ParamGroup, tuple[torch.Tensor, Block]] = {}
        self._retiring: deque[_Retiring] = deque()

    def has_room(self, nbytes: int) -> bool:
        return self._host.largest_free >= round_up(nbytes)

    def find(self, group: ParamGroup) -> torch.Tensor | None:
        """The group's image, if it has one."""
        staged = self._images.get(group)
        return None if staged is None else staged[0]

    def make(self, group: ParamGroup) -> torch.Tensor:
        """A new image (uint8, undefined contents), as soon as there is room. Raises `BudgetError`."""
        block = self._host.allocate(group.nbytes, Purpose.STAGING)
        while block is None and self._wait_for_release():
            block = self._host.allocate(group.nbytes, Purpose.STAGING)
        if block is None:
            raise BudgetError(
                f"staging {group.name!r} needs {format_bytes(group.nbytes)} of host memory; "
                f"{format_bytes(self._host.free_bytes)} are free; raise host_memory"
            )
        tensor, _ = tensor_over(block.address, round_up(group.nbytes))
        self._images[group] = (tensor, block)
        return tensor

    def discard(self, group: ParamGroup) -> None:
        """Gives the image back at once; nothing reads it."""
        staged = self._images.pop(group, None)
        if staged is not None:
            self._host.free(staged[1])

    def deliver(self, group: ParamGroup, writes: Iterable[Transfer]) -> None:
        """Starts the copy of the image to the group's lease; ``writes`` may be reading it."""
        if group.lease is None:
            return
        staged = self._images.pop(group, None)
        if staged is None:
            return
        image, block = staged
        group.lease.tensor[: image.numel()].copy_(image, non_blocking=True)
        event = None
        if group.lease.tensor.device.type != "cpu":
            event = torch.Event(group.lease.tensor.device.type)
            event.record()
        self._retiring.append(_Retiring(block, event, list(writes)))

    def retire(self, *, wait: bool) -> bool:
        """Frees what nothing reads any more; with ``wait``, at least the oldest. Whether it did."""
        freed = False
        while self._retiring:
            oldest = self._retiring[0]
            if wait and not freed:
                oldest.finish()
            elif not oldest.finished():
                break
            self._host.free(self._retiring.popleft().block)
            freed = True
        return freed
