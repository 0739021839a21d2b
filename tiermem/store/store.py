"""`TieredStore`: records over host memory and storage paths, read and written asynchronously.

[Note: ordering] Two transfers of one record conflict if their ranges overlap and one of them writes.
A transfer is submitted only when no conflicting one is in flight, which gives read-after-write,
write-after-read and write-after-write per record without any barrier between records. The store's
lock is never held while waiting, so the other thread's transfers go on.

[Note: failed writes] A failed write leaves its record undefined. The record is then ``failed`` and
cannot be read until writes after the failure have covered all of it. ``on_failed_write`` hears of it
before anybody else can. The error is raised where the transfer is waited for or else by the next
`raise_failed`, `reap`, `drain` or `close`: it is never dropped.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tiermem.errors import ConfigError, IOContext, StateError, TierIOError
from tiermem.io.base import Engine, Op, Priority, QueueOptions
from tiermem.memory.arena import Arena
from tiermem.store.records import (
    Record,
    RecordSpan,
    RecordSpec,
    allocate,
    check_readable,
    check_span,
    pieces_of,
    refresh,
    refusal,
)
from tiermem.store.stats import StoreStats
from tiermem.store.striping import StripeMap, UnitSequence, plan_extents
from tiermem.store.targets import Targets
from tiermem.store.transfer import Transfer, enter
from tiermem.types import ALIGNMENT, format_bytes

logger = logging.getLogger(__name__)


class TieredStore:
    """Holds records; one file per path and generation in a directory of this run's own.

    ``weights`` are the paths' shares (None: equal). ``stripe_bytes`` is the unit that records are cut
    into. The engine and the arena stay the caller's and must outlive the store. ``on_failed_write`` is
    called on any thread and under the store's lock: it may not use the store. Raises `ConfigError`
    for paths, weights or stripes that cannot work. Any thread may call any method.
    """

    def __init__(
        self,
        engine: Engine,
        arena: Arena,
        *,
        paths: Sequence[Path] = (),
        weights: Sequence[float] | None = None,
        stripe_bytes: int = 1 << 20,
        queue_options: QueueOptions | None = None,
        direct: bool = True,
        on_failed_write: Callable[[Record, TierIOError], None] | None = None,
    ) -> None:
        if stripe_bytes <= 0 or stripe_bytes % ALIGNMENT:
            raise ConfigError(
                f"stripe_bytes is {stripe_bytes}; give a positive multiple of {ALIGNMENT}"
            )
        weights = tuple(weights) if weights is not None else (1.0,) * len(paths)
        if len(weights) != len(paths) or any(not 0 < weight < float("inf") for weight in weights):
            raise ConfigError(
                f"path weights {list(weights)} for {len(paths)} paths; give one above 0 for each"
            )
        self._engine_name = engine.name
        self._arena = arena
        self._shares = tuple(weight / sum(weights) for weight in weights)
        self._stripe_bytes = stripe_bytes
        self._targets = Targets(engine, paths, queue_options or QueueOptions(), direct=direct)
        self._pid = os.getpid()
        self._on_failed_write = on_failed_write
        self._lock = threading.Lock()
        # All below is guarded by _lock.
        self._closed = False
        self._records: list[Record] = []
        self._sequences: dict[tuple[float, ...], UnitSequence] = {}
        self._in_flight: dict[Transfer, None] = {}  # an ordered set
        self._unreported: dict[Transfer, None] = {}  # failed writes, see [Note: failed writes]
        self._conflict_waits = 0

    def add(self, spec: RecordSpec, generation: int = 0) -> Record:
        """Makes room for a record; its contents are absent until written.

        Raises `BudgetError` if its host part does not fit the arena, `TierIOError` (ENOSPC, with
        needed and free bytes) if a path is full, `ConfigError` for an NVMe record without paths. The
        store is then as it was.
        """
        if not spec.host_only and not self._targets.num_paths:
            raise ConfigError(f"record {spec.name!r} is to lie on NVMe, but no paths are configured")
        with self._lock:
            self._check_open()
            extents = None if spec.host_only else self._plan(spec)
            host_bytes = spec.nbytes if extents is None else extents.target_bytes[-1]
            block = allocate(self._arena, spec, host_bytes) if host_bytes else None
            try:
                bases = self._targets.grow(generation, extents.target_bytes[:-1]) if extents else ()
            except BaseException:
                if block is not None:
                    self._arena.free(block)
                raise
            record = Record(spec, generation, extents, block, bases)
            self._records.append(record)
            return record

    def check_room(self, nbytes: int) -> None:
        """Raises `TierIOError` (ENOSPC or EFBIG, with the figures) if the paths cannot take ``nbytes``
        bytes more at their shares."""
        with self._lock:
            self._targets.check_room([int(nbytes * share) for share in self._shares], nbytes)

    def read(
        self,
        record: Record,
        start: int,
        stop: int,
        address: int,
        owner: object = None,
        priority: Priority = Priority.BACKGROUND,
    ) -> Transfer:
        """Starts reading one `RecordSpan`: the bytes [start, stop) of ``record`` to ``address``.

        The memory must stay valid: ``owner`` is held until completion. Blocks while a write of an
        overlapping range is in flight (see `would_wait`). Raises `StateError` for a range that was
        never written or a record whose write failed.
        """
        return self.read_many((RecordSpan(record, start, stop, address),), owner, priority)[0]

    def write(
        self,
        record: Record,
        start: int,
        stop: int,
        address: int,
        owner: object = None,
        priority: Priority = Priority.BACKGROUND,
    ) -> Transfer:
        """Starts writing; as `read`, and blocks while reads of an overlapping range are in flight."""
        return self.write_many((RecordSpan(record, start, stop, address),), owner, priority)[0]

    def read_many(
        self,
        spans: Sequence[RecordSpan],
        owner: object = None,
        priority: Priority = Priority.BACKGROUND,
    ) -> list[Transfer]:
        """As `read` for each of ``spans``, at a fraction of the cost where records are small: all are
        handed over at once, and neighbours in storage and memory are one request. All of them are
        started or none; each transfer is waited for, and fails, by itself."""
        return self._start(Op.READ, spans, (owner, priority))

    def write_many(
        self,
        spans: Sequence[RecordSpan],
        owner: object = None,
        priority: Priority = Priority.BACKGROUND,
    ) -> list[Transfer]:
        """As `read_many`. ValueError for spans that overlap each other. If the engine refuses a part,
        the records of which something was started have failed."""
        return self._start(Op.WRITE, spans, (owner, priority))

    def would_wait(self, record: Record, start: int, stop: int, op: Op) -> bool:
        """Whether `read` or `write` of this range would block now. Never blocks itself."""
        return any(not transfer.done() for transfer in self._conflicts(record, start, stop, op))

    def view_address(self, record: Record, start: int = 0) -> int:
        """Where byte ``start`` of a record that lies wholly in host memory is: use without a copy.

        Waits for the record's transfers; the caller starts none while it uses the memory. Raises
        `StateError` for records with parts on NVMe. A record that is filled this way is not readable
        until `mark_written`.
        """
        if not record.host_only or record.block is None:
            raise StateError(
                f"record {record} lies at least partly on NVMe and has no address; use read()"
            )
        if not 0 <= start < record.nbytes:
            raise ValueError(f"byte {start} is not in record {record}")
        for transfer in self._conflicts(record, 0, record.nbytes, Op.WRITE):
            transfer.complete()
        with self._lock:
            self._check_open()
            if record.failed is not None:
                raise StateError(refusal(record))
        return record.block.address + start

    def mark_written(self, record: Record) -> None:
        """All of a record was filled through `view_address`."""
        if not record.host_only:
            raise StateError(f"record {record} lies partly on NVMe; write() it")
        with self._lock:
            record.written.add(0, record.nbytes)
            record.failed = None
            refresh(record)

    def reap(self) -> None:
        """Settles what has completed, without blocking. Raises a failed write nobody waited for."""
        with self._lock:
            transfers = list(self._in_flight)
        for transfer in transfers:
            transfer.done()
        self.raise_failed()

    def drain(self) -> None:
        """Blocks until nothing is in flight. Raises a failed write nobody waited for."""
        self._settle_all()
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raises a settled failed write nobody waited for, once; further ones are logged."""
        with self._lock:
            failed = list(self._unreported)
            self._unreported.clear()
        for transfer in failed:
            transfer.reported = True
        for transfer in failed[1:]:
            logger.error("%s", transfer.error)
        if failed:
            assert failed[0].error is not None
            raise failed[0].error

    def close(self) -> None:
        """Drains, closes and deletes this run's files, frees its host memory. Idempotent.

        Raises a failed write nobody waited for, after everything is cleaned up.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() == self._pid:  # a forked child has no I/O threads to wait for
            self._settle_all()
            for record in self._records:
                if record.block is not None:
                    self._arena.free(record.block)
                    record.block = None
        try:
            self._targets.close()
        finally:
            self.raise_failed()

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_paths(self) -> int:
        return self._targets.num_paths

    @property
    def direct(self) -> bool:
        """Whether every path really is O_DIRECT."""
        return self._targets.direct

    def stats(self) -> StoreStats:
        """Totals since the store was made; bytes are those of settled transfers, padding included."""
        with self._lock:
            return StoreStats(
                self._targets.stats(),
                self._targets.copied_bytes,
                sum(record.host_bytes for record in self._records),
                len(self._records),
                len(self._in_flight),
                self._conflict_waits,
            )

    def describe(self) -> str:
        """For people: the records, and each path with its share and how it is driven."""
        stripes = f"stripes of {format_bytes(self._stripe_bytes)}, engine {self._engine_name}"
        return self.stats().describe(self._shares, stripes)

    def settle(self, transfer: Transfer) -> None:
        """For `Transfer`: waits for it and brings its record up to date, once."""
        requests = transfer.requests
        error = transfer.collect()
        with self._lock:
            if transfer.settled:
                return
            record = transfer.record
            if error is not None and transfer.op is Op.WRITE:
                self._poison(record, error)
            owner = transfer.finish(error)
            record.in_flight.remove(transfer)
            del self._in_flight[transfer]
            if error is None:
                self._targets.count(transfer.op, requests)
            if transfer.op is Op.WRITE:
                self._settle_write(transfer)
            refresh(record)
        del owner  # only now: see Transfer.finish

    def reported(self, transfer: Transfer) -> None:
        """For `Transfer`: its failure has been raised."""
        with self._lock:
            self._unreported.pop(transfer, None)

    def _start(
        self, op: Op, spans: Sequence[RecordSpan], terms: tuple[object, Priority]
    ) -> list[Transfer]:
        for span in spans:
            check_span(span)
        while True:
            with self._lock:
                self._check_open()
                transfers = [Transfer(op, span, terms[0], self) for span in spans]
                conflicts = enter(transfers)
                if not conflicts:
                    self._submit(op, transfers, spans, terms)
                    return transfers
                self._conflict_waits += 1
            for other in conflicts:
                other.complete()

    def _submit(
        self,
        op: Op,
        transfers: Sequence[Transfer],
        spans: Sequence[RecordSpan],
        terms: tuple[object, Priority],
    ) -> None:
        """Under the lock, with nothing conflicting in flight."""
        host = self._targets.num_paths
        try:
            if op is Op.READ:
                for span in spans:
                    check_readable(span)
            places = [(one, pieces_of(span, host)) for one, span in zip(transfers, spans, strict=True)]
            self._targets.submit(op, places, terms)
        except BaseException as error:
            self._give_up(transfers, error)
            raise
        for transfer in transfers:
            self._in_flight[transfer] = None
            refresh(transfer.record)

    def _give_up(self, transfers: Sequence[Transfer], error: BaseException) -> None:
        """Some pieces may be under way and nobody will ever wait for these transfers: wait here."""
        for transfer in transfers:
            record, started = transfer.record, bool(transfer.requests)
            transfer.finish(transfer.collect())
            record.in_flight.remove(transfer)
            if transfer.op is Op.WRITE and started:
                context = IOContext("write", "", transfer.start, transfer.nbytes, record.name)
                self._poison(record, TierIOError(errno.EIO, context, f"not all was submitted: {error}"))

    def _conflicts(self, record: Record, start: int, stop: int, op: Op) -> list[Transfer]:
        with self._lock:
            return [other for other in record.in_flight if other.conflicts(op, start, stop)]

    def _settle_write(self, transfer: Transfer) -> None:
        record = transfer.record
        if transfer.error is not None:
            self._unreported[transfer] = None
            return
        record.written.add(transfer.start, transfer.stop)
        if record.failed is not None and record.written.covers(0, record.nbytes):
            record.failed = None

    def _poison(self, record: Record, error: TierIOError) -> None:
        """From here on only writes count towards ``written`` that are settled after the failure."""
        record.failed = error
        record.written.clear()
        if self._on_failed_write is not None:
            self._on_failed_write(record, error)

    def _settle_all(self) -> None:
        while True:
            with self._lock:
                transfers = list(self._in_flight)
            if not transfers:
                return
            for transfer in transfers:
                transfer.complete()

    def _plan(self, spec: RecordSpec) -> StripeMap:
        """Records with the same host fraction continue one sequence, so that small ones spread too."""
        paths = tuple(share * (1 - spec.host_fraction) for share in self._shares)
        weights = (*paths, spec.host_fraction)
        sequence = self._sequences.get(weights)
        if sequence is None:
            sequence = self._sequences[weights] = UnitSequence(weights)
        return plan_extents(spec.nbytes, self._stripe_bytes, weights, sequence)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the store is closed; use it before close()")
