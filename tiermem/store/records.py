"""What the store holds: `Record`, its specification, and the states it goes through."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tiermem.errors import BudgetError, ConfigError, StateError, TierIOError
from tiermem.io.base import Op
from tiermem.memory.arena import Arena, Block
from tiermem.memory.ranges import RangeSet
from tiermem.store.striping import Piece, StripeMap
from tiermem.types import ALIGNMENT, Purpose, Tier, format_bytes, round_up

if TYPE_CHECKING:
    from tiermem.store.transfer import Transfer


class Residency(enum.Enum):
    """Where a record's bytes are, or what is being done to them.

    [Note: residency] A record rests ABSENT (never written), in HOST (all of it in host memory) or in
    NVME (all or part of it on the paths). It is WRITING while any write is in flight, else READING
    while any read is; several transfers of one record may be in flight on ranges that do not conflict.
    """

    ABSENT = "absent"
    NVME = "nvme"
    READING = "reading"
    HOST = "host"
    WRITING = "writing"

    __hash__ = object.__hash__  # members are singletons; Enum's own hashes the name, in Python


_MOVES: Mapping[Residency, frozenset[Residency]] = {
    Residency.ABSENT: frozenset({Residency.WRITING, Residency.HOST}),
    Residency.NVME: frozenset({Residency.READING, Residency.WRITING}),
    Residency.HOST: frozenset({Residency.READING, Residency.WRITING}),
    Residency.READING: frozenset({Residency.NVME, Residency.HOST, Residency.WRITING}),
    # To READING: reads of other ranges remain. Never back to ABSENT: a failed write leaves a record
    # that is ``failed``, which is not the same as one that was never written.
    Residency.WRITING: frozenset({Residency.NVME, Residency.HOST, Residency.READING}),
}


@dataclass(frozen=True, slots=True)
class RecordSpec:
    """What is to be stored. ``nbytes`` need not be aligned.

    ``tier`` HOST is one contiguous block of host memory; NVME is striped over the paths, with
    ``host_fraction`` of it (0 to 1) in host memory, to the nearest stripe unit.
    """

    name: str
    field: str  # a `Field`, or the name of an optimizer's state
    nbytes: int
    tier: Tier
    host_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.nbytes <= 0:
            raise ConfigError(f"record {self.name!r} has {self.nbytes} bytes; give at least 1")
        if self.tier not in (Tier.HOST, Tier.NVME):
            raise ConfigError(
                f"record {self.name!r} cannot be stored in {self.tier.value}; give host or nvme"
            )
        if not 0 <= self.host_fraction <= 1:
            raise ConfigError(
                f"record {self.name!r} has host_fraction {self.host_fraction}; give 0 to 1"
            )

    @property
    def host_only(self) -> bool:
        return self.tier is Tier.HOST or self.host_fraction == 1


@dataclass(slots=True, eq=False)
class Record:
    """One stored record. Made by `TieredStore.add`; everything mutable is guarded by its lock."""

    spec: RecordSpec
    generation: int
    extents: StripeMap | None  # None: contiguous in ``block``
    block: Block | None  # what lies in host memory
    bases: tuple[int, ...]  # where the record's space starts in each path's file
    residency: Residency = Residency.ABSENT
    failed: TierIOError | None = None
    """The write that left the contents undefined; cleared when all of it has been rewritten."""
    in_flight: list[Transfer] = field(default_factory=list)
    written: RangeSet = field(default_factory=RangeSet)

    @property
    def name(self) -> str:
        return f"{self.spec.name}/{self.spec.field}"

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def host_only(self) -> bool:
        """Whether all of it lies in host memory, in one piece (see `TieredStore.view_address`)."""
        return self.extents is None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes."""
        return self.block.capacity if self.block else 0

    @property
    def resting(self) -> Residency:
        """The state when nothing is in flight."""
        if not self.written and self.failed is None:
            return Residency.ABSENT
        return Residency.HOST if self.host_only else Residency.NVME

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.nbytes)}, {self.residency.value})"


def allocate(arena: Arena, spec: RecordSpec, nbytes: int) -> Block:
    """Host memory for the part of a record that lies there. Raises `BudgetError` if it does not fit."""
    block = arena.allocate(nbytes, Purpose.RESIDENT)
    if block is None:
        raise BudgetError(
            f"{nbytes} bytes ({format_bytes(nbytes)}) of record {spec.name!r} do not fit in "
            f"{arena.tier.value} memory: the largest free part of the budget of {arena.nbytes} bytes "
            f"is {arena.largest_free} bytes; raise {arena.tier.value}_memory or keep more on a lower "
            f"tier"
        )
    return block


class RecordSpan(NamedTuple):
    """The bytes [start, stop) of ``record`` and where in memory they go or come from.

    ``start`` is a multiple of 4096, ``stop`` too or the end of the record; at ``address``, a multiple
    of 4096 too, there is room for ``stop - start`` rounded up to 4096.
    """

    record: Record
    start: int
    stop: int
    address: int


def transition(record: Record, to: Residency) -> None:
    """The only place that changes a record's residency (see [Note: residency]).

    Staying is always possible. Raises `StateError` for a move that cannot be.
    """
    if to is record.residency:
        return
    if to not in _MOVES[record.residency]:
        possible = ", ".join(sorted(move.value for move in _MOVES[record.residency]))
        raise StateError(
            f"record {record.name} cannot go from {record.residency.value} to {to.value}; "
            f"from there it can go to {possible}"
        )
    record.residency = to


def refresh(record: Record) -> None:
    """Brings the state in line with what is in flight (see [Note: residency])."""
    if not record.in_flight:
        transition(record, record.resting)
    elif any(transfer.op is Op.WRITE for transfer in record.in_flight):
        transition(record, Residency.WRITING)
    else:
        transition(record, Residency.READING)


def pieces_of(span: RecordSpan, host: int) -> list[Piece]:
    """Where the range lies; ``host`` is the target number of host memory."""
    record, start, stop = span.record, span.start, round_up(span.stop)
    if record.extents is None:
        return [Piece(host, start, start, stop - start)]
    return record.extents.resolve(start, stop)


def check_span(span: RecordSpan) -> None:
    """Raises ValueError for a range or an address that no transfer can have."""
    record, start, stop, address = span
    if not 0 <= start < stop <= record.nbytes:
        raise ValueError(
            f"[{start}, {stop}) is not a range of record {record.name} of {record.nbytes} bytes"
        )
    if start % ALIGNMENT or (stop % ALIGNMENT and stop != record.nbytes) or address % ALIGNMENT:
        raise ValueError(
            f"[{start}, {stop}) of record {record.name} at address {address:#x}: start and address "
            f"must be multiples of {ALIGNMENT}, and stop too or the record's end ({record.nbytes})"
        )


def check_readable(span: RecordSpan) -> None:
    """Raises `StateError` if the range holds nothing, or nothing that can be trusted."""
    record, start, stop, _ = span
    if record.failed is not None:
        raise StateError(refusal(record))
    if not record.written.covers(start, stop):
        raise StateError(
            f"bytes [{start}, {stop}) of record {record} were never written; write them first"
        )


def refusal(record: Record) -> str:
    """Why a failed record cannot be read."""
    return (
        f"record {record.name} is undefined since a write of it failed ({record.failed}); write all of "
        f"it again before reading"
    )
