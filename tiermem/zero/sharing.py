"""How the ranks of one communicator share a group: what each of them keeps, updates and sends.

[Note: stages] One mechanism, three questions, answered here for every stage:

| stage | parameters between uses | optimizer states | gradients are reduced |
|---|---|---|---|
| 0 | whole on every rank | whole on every rank | in a step's last backward, and exchanged |
| 1 | whole on every rank | the rank's shard | in a step's last backward |
| 2 | whole on every rank | the rank's shard | in every backward |
| 3 | the rank's shard | the rank's shard | in every backward |

Which backward is a step's last is known if ``gradient_accumulation_steps`` is declared; without it
every backward reduces at every stage.

Parameters below the persistence threshold are whole at stage 3 too, as at stage 2 (Rajbhandari et
al., "ZeRO", SC '20, section 5; stage 3 persistence as in DeepSpeed). Alone a rank owns everything and
none of this happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiermem.comm import Communicator, Exchange, Message
from tiermem.types import ALIGNMENT
from tiermem.zero.layout import GroupLayout, RegionLayout, Span

PATIENCE_S = 0.5
"""How long a rank waits for what another may only send at the end of its backward, before it sees to
what others may wait for: see [Note: late groups] (reduce.py) and `SharedShards.start_owed`."""


@dataclass(frozen=True, slots=True)
class RecordPart:
    """``nbytes`` bytes at ``record_offset`` of a group's record are those at ``buffer_offset`` of its
    buffer."""

    record_offset: int
    buffer_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """See [Note: stages]. ``stays``: the group never leaves the device, so its parameters are whole at
    stage 3 too."""

    comm: Communicator
    stage: int
    stays: bool

    @property
    def alone(self) -> bool:
        return self.comm.size == 1

    @property
    def sharded(self) -> bool:
        """Whether this rank keeps only its shard of the parameters between uses."""
        return not self.alone and not self.stays

    @property
    def keeps_whole(self) -> bool:
        """Whether an update on this rank updates all parameters of the group."""
        return self.alone or self.stage == 0

    def shard(self, region: RegionLayout) -> Span:
        """What this rank reduces and sends of ``region``."""
        return region.shard(self.comm.rank, self.comm.size)

    def owned(self, region: RegionLayout) -> Span:
        """What this rank updates of ``region``, and keeps states and gradients of."""
        return Span(0, region.numel) if self.keeps_whole else self.shard(region)

    def record_parts(self, layout: GroupLayout) -> tuple[RecordPart, ...]:
        """What the record of parameters holds, in its order; every number a multiple of 4096."""
        if not self.sharded:
            return (RecordPart(0, 0, layout.nbytes),)
        parts, offset = [], 0
        for region in layout.regions:
            shard, itemsize = self.shard(region), region.dtype.itemsize
            nbytes = shard.numel * itemsize
            parts.append(RecordPart(offset, region.byte_offset + shard.start * itemsize, nbytes))
            offset += nbytes
        return tuple(parts)


class Exchanges:
    """The exchanges of a group's regions as one. Keeps the memory that they use."""

    __slots__ = ("_memory", "_parts")

    def __init__(self, parts: Sequence[Exchange], memory: object) -> None:
        self._parts = parts
        self._memory = memory

    def received_within(self, seconds: float) -> bool:
        return all(part.received_within(seconds) for part in self._parts)

    def over_within(self, seconds: float) -> bool:
        return all(part.over_within(seconds) for part in self._parts)

    def wait_received(self) -> None:
        for part in self._parts:
            part.wait_received()

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


def share_out(
    sharing: Sharing, message: Message, whole: torch.Tensor, most_numel: int | None = None
) -> list[Exchange]:
    """Starts giving this rank's shard of ``whole`` (1-D, padded like its region) to all others and
    taking theirs, in place: an all-gather, of at most ``most_numel`` elements of all ranks at a
    time, but of 4096 bytes of each at least."""
    comm = sharing.comm
    numel = whole.numel() // comm.size
    unit = ALIGNMENT // whole.element_size()
    step = numel if most_numel is None else max(unit, most_numel // comm.size // unit * unit)
    exchanges = []
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        shards = [whole[rank * numel + start : rank * numel + stop] for rank in range(comm.size)]
        exchanges.append(comm.exchange(message, [shards[comm.rank]] * comm.size, shards))
    return exchanges
