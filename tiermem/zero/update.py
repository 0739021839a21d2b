"""The update pipeline: states stream through slots while the parameters lie in their lease.

[Note: updates] An update needs the group's parameters in a lease (the gather scheduler sees to
that) and runs on one worker thread, group after group in the order of use: for each slice of a
region the states are read into a slot, the rule's kernel updates everything in place, and states
and parameters are written back. Reads of later slices, across groups, are in flight meanwhile. The
job is done when its last kernel is; its writes finish behind it and hold lease and slot. The worker
touches no module and no collective.

[Note: torn] There is one generation of every record. An error before the first write of an update
leaves everything as it was: the update stays pending and can be tried again. After the first write
some records are new and some old; the run is TORN and refuses everything but a checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tiermem.errors import BudgetError, StateError
from tiermem.io.base import Priority
from tiermem.kernels import Kernels
from tiermem.memory.arena import Arena, Block
from tiermem.memory.lease import tensor_over
from tiermem.store.store import TieredStore
from tiermem.store.transfer import Transfer
from tiermem.types import ALIGNMENT, Purpose, format_bytes, round_up
from tiermem.zero.rule import UpdateRule

if TYPE_CHECKING:
    from tiermem.zero.gradients import GradientStore
    from tiermem.zero.group import ParamGroup, Region, Transfers
    from tiermem.zero.group_gradient import GroupGradient

logger = logging.getLogger(__name__)


_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(slots=True)
class PendingUpdate:
    """Everything an update uses, frozen when ``step()`` was called."""

    rule: UpdateRule
    hyper: dict[int, Any]  # by parameter index
    gradient: GroupGradient


@dataclass(slots=True, eq=False)
class UpdateJob:
    """One group's update under way. ``image`` is the group's parameters in host memory (the lease
    itself where the device is the CPU)."""

    group: ParamGroup
    pending: PendingUpdate
    image: torch.Tensor
    gathered: Transfers | None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    written: bool = False  # something was written back; see [Note: torn]
    writes: list[Transfer] = field(default_factory=list)
    slices_left: int = 0


@dataclass(slots=True, eq=False)
class _Slot:
    block: Block
    tensor: torch.Tensor
    writes: list[Transfer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Slice:
    job: UpdateJob
    region: Region
    start: int
    stop: int
    slot: _Slot | None
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: torch.Tensor | None = None
    reads: list[Transfer] = field(default_factory=list)
    fresh: list[torch.Tensor] = field(default_factory=list)  # states that start at zero


class UpdatePipeline:
    """See [Note: updates]. `enqueue` and the waiting calls belong to the training thread."""

    def __init__(self, store: TieredStore, arena: Arena, kernels: Kernels) -> None:
        self._store = store
        self._arena = arena
        self._kernels = kernels
        self.gradients: GradientStore | None = None
        self.sub_group_numel = 1 << 20
        self._slots: list[_Slot] = []
        self._slices: deque[_Slice] = deque()  # of jobs that were begun; worker only
        self._in_use: set[int] = set()  # ids of slots that slices use; worker only
        self._lock = threading.Condition()
        self._jobs: deque[UpdateJob] = deque()
        self._unfinished: dict[UpdateJob, None] = {}
        self._closing = False
        self._thread: threading.Thread | None = None
        self.busy_seconds = 0.0

    # ---- training thread

    def configure(self, num_slots: int, slot_bytes: int, sub_group_numel: int) -> None:
        """Makes room for slices of ``sub_group_numel`` elements."""
        self.release_slots()
        self.sub_group_numel = max(sub_group_numel, ALIGNMENT)
        for _ in range(num_slots):
            block = self._arena.allocate(slot_bytes, Purpose.OPTIMIZER)
            if block is None:
                raise BudgetError(
                    f"update slots of {format_bytes(slot_bytes)} do not fit host_memory, "
                    f"{format_bytes(self._arena.free_bytes)} are free; raise host_memory"
                )
            tensor, _ = tensor_over(block.address, round_up(slot_bytes))
            self._slots.append(_Slot(block, tensor))

    def release_slots(self) -> None:
        """Gives all slots back, for another division of the budget."""
        self.quiesce()
        self._free_slots()

    def enqueue(self, job: UpdateJob) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tiermem-update", daemon=True)
            self._thread.start()
        with self._lock:
            self._unfinished[job] = None
            self._jobs.append(job)
            self._lock.notify_all()

    def wait(self, job: UpdateJob) -> None:
        """Blocks until the job's kernels are done. Raises its error."""
        job.done.wait()
        if job.error is not None:
            raise job.error

    def wait_oldest(self) -> bool:
        """Blocks until the oldest unfinished job is done; False if there is none."""
        with self._lock:
            job = next(iter(self._unfinished), None)
        if job is None:
            return False
        job.done.wait()
        return True

    def quiesce(self) -> None:
        """Blocks until no job is under way (errors stay with their jobs)."""
        while self.wait_oldest():
            pass

    def settle(self) -> None:
        """Blocks until every write-back of states is done."""
        self.quiesce()
        for slot in self._slots:
            self._settle(slot)

    def borrow(self) -> torch.Tensor:
        """An idle slot's memory for a read-modify-write by the training thread (after `quiesce`,
        before the next `enqueue`)."""
        self.quiesce()
        if not self._slots:
            block = self._arena.allocate(1 << 20, Purpose.OPTIMIZER)
            if block is None:
                raise BudgetError("no 1 MiB of host memory is free to edit states; raise host_memory")
            self._slots.append(_Slot(block, tensor_over(block.address, 1 << 20)[0]))
        slot = self._slots[0]
        self._settle(slot)
        return slot.tensor

    def close(self) -> None:
        self.quiesce()
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._free_slots()

    def _free_slots(self) -> None:
        for slot in self._slots:
            self._settle(slot)
            self._arena.free(slot.block)
        self._slots.clear()

    # ---- worker

    def _work(self) -> None:
        active: deque[_Slice] = deque()
        try:
            while True:
                if not active and self._peek() is None and not self._await_job():
                    return
                self._top_up(active)
                if active:
                    self._finish(active.popleft())
        except BaseException as error:  # a defect of ours: nobody may wait for ever
            logger.exception("the update worker failed")
            self._fail_all(error)

    def _await_job(self) -> bool:
        with self._lock:
            while not self._jobs and not self._closing:
                self._lock.wait()
            return bool(self._jobs)

    def _peek(self) -> _Slice | None:
        """The next slice of the jobs at hand."""
        while not self._slices:
            with self._lock:
                if not self._jobs:
                    return None
                job = self._jobs.popleft()
            self._slices.extend(self._cut(job))
        return self._slices[0]

    def _top_up(self, active: deque[_Slice]) -> None:
        """Starts reads of the next slices while slots are free. A slot is asked for only when
        there is a slice for it: the worker never waits for a slot without work."""
        while (piece := self._peek()) is not None:
            piece.slot = self._free_slot(block=not active)
            if piece.slot is not None:
                self._in_use.add(id(piece.slot))
            elif self._slots or len(active) >= 2:
                return
            self._slices.popleft()
            if piece.job.error is None:
                try:
                    self._begin(piece)
                except Exception as error:
                    piece.job.error = error
            active.append(piece)

    def _free_slot(self, *, block: bool) -> _Slot | None:
        """A slot that no slice uses and whose writes are done; the one to be done first if
        ``block``."""
        idle = [slot for slot in self._slots if id(slot) not in self._in_use]
        for slot in idle:
            if all(write.done() for write in slot.writes):
                self._settle(slot)
                return slot
        if block and idle:
            self._settle(idle[0])
            return idle[0]
        return None

    def _settle(self, slot: _Slot) -> None:
        """Waits for a slot's writes, then forgets them: worker and training thread may both wait."""
        for write in list(slot.writes):
            write.complete()  # the store raises what failed
        slot.writes = [write for write in slot.writes if not write.settled]

    def _cut(self, job: UpdateJob) -> list[_Slice]:
        """The slices of a job. A region whose states were never written is walked whole."""
        pieces = []
        for region in job.group.regions:
            members = [i for i in region.layout.params if i in job.pending.hyper]
            if not members:
                continue
            segments = [job.group.layout.segments[i] for i in members]
            states = job.pending.rule.states(region.layout.dtype)
            whole = any(state.name not in region.initialised for state in states)
            for start in range(region.owned.start, region.owned.stop, self.sub_group_numel):
                stop = min(start + self.sub_group_numel, region.owned.stop)
                if whole or any(s.start < stop and s.stop > start for s in segments):
                    pieces.append(_Slice(job, region, start, stop, None))
        job.slices_left = len(pieces)
        if not pieces:
            self._complete(job)
        return pieces

    def _begin(self, piece: _Slice) -> None:
        """Starts the reads of one slice."""
        region, job = piece.region, piece.job
        offset = 0
        count = piece.stop - piece.start
        first = piece.start - region.owned.start
        for spec in job.pending.rule.states(region.layout.dtype):
            state = region.states[spec.name]
            record, at, nbytes = state.record, spec.nbytes(first), spec.nbytes(count)
            fresh = spec.name not in region.initialised
            if record.host_only:
                tensor = tensor_over(state.store.view_address(record, at), nbytes)[0]
            else:
                assert piece.slot is not None
                tensor = piece.slot.tensor[offset : offset + round_up(nbytes)]
                offset += round_up(nbytes)
                if not fresh:
                    piece.reads.append(
                        state.store.read(
                            record,
                            at,
                            _stop_byte(record.nbytes, at + nbytes),
                            tensor.data_ptr(),
                            owner=tensor,
                            priority=Priority.BACKGROUND,
                        )
                    )
            piece.states[spec.name] = tensor[:nbytes].view(spec.dtype)
            if fresh:
                piece.fresh.append(piece.states[spec.name])
        piece.gradient = self._begin_gradient(piece, offset)

    def _begin_gradient(self, piece: _Slice, offset: int) -> torch.Tensor:
        """The slice's gradients: in memory, or on their way into the slot."""
        own = piece.job.pending.gradient
        dtype = own.dtype(piece.region)
        count = piece.stop - piece.start
        start = own.offset(piece.region)
        start += (piece.start - own.span(piece.region).start) * dtype.itemsize
        if own.pinned:
            tensor = own.tensor
            assert tensor is not None
            return tensor[start : start + count * dtype.itemsize].view(dtype)
        record = piece.job.group.gradient_record
        assert record is not None
        assert piece.slot is not None
        room = piece.slot.tensor[offset : offset + round_up(count * dtype.itemsize)]
        piece.reads.append(
            self._store.read(
                record,
                start,
                _stop_byte(record.nbytes, start + count * dtype.itemsize),
                room.data_ptr(),
                owner=room,
                priority=Priority.BACKGROUND,
            )
        )
        return room[: count * dtype.itemsize].view(dtype)

    def _finish(self, piece: _Slice) -> None:
        """Waits for a slice's reads, updates it, starts its writes."""
        job = piece.job
        try:
            for read in piece.reads:  # all, before the first error gives the slot to another slice
                read.complete()
            for read in piece.reads:
                read.wait()
            if job.gathered is not None:
                job.gathered.wait()
            if job.error is None:
                started = time.perf_counter()
                self._apply(piece)
                self.busy_seconds += time.perf_counter() - started
                self._write_back(piece)
        except Exception as error:
            job.error = job.error or error
        finally:
            if piece.slot is not None:
                self._in_use.discard(id(piece.slot))
        piece.states.clear()
        piece.fresh.clear()
        piece.gradient = None
        job.slices_left -= 1
        if job.slices_left == 0:
            self._complete(job)

    def _apply(self, piece: _Slice) -> None:
        job, layout = piece.job, piece.region.layout
        for tensor in piece.fresh:
            tensor.zero_()
        assert piece.gradient is not None
        itemsize, specs = layout.dtype.itemsize, job.pending.rule.states(layout.dtype)
        params = job.image[layout.byte_offset : layout.byte_offset + layout.numel * itemsize].view(
            layout.dtype
        )
        for index in layout.params:
            hyper = job.pending.hyper.get(index)
            segment = job.group.layout.segments[index]
            first, last = max(segment.start, piece.start), min(segment.stop, piece.stop)
            if hyper is None or first >= last:
                continue
            start, stop = first - piece.start, last - piece.start
            job.pending.rule.apply(
                self._kernels,
                hyper,
                params[first:last],
                {
                    spec.name: piece.states[spec.name][spec.count(start) : spec.count(stop)]
                    for spec in specs
                },
                piece.gradient[start:stop],
            )

    def _write_back(self, piece: _Slice) -> None:
        job, region, layout = piece.job, piece.region, piece.region.layout
        start = piece.start - region.owned.start
        stop = piece.stop - region.owned.start
        for spec in job.pending.rule.states(layout.dtype):
            state = region.states[spec.name]
            record = state.record
            job.written = True
            if record.host_only:
                continue
            assert piece.slot is not None
            piece.slot.writes.append(
                state.store.write(
                    record,
                    spec.nbytes(start),
                    _stop_byte(record.nbytes, spec.nbytes(stop)),
                    piece.states[spec.name].data_ptr(),
                    owner=piece.slot.tensor,
                )
            )
        if job.group.record is not None:
            first = layout.byte_offset + piece.start * layout.dtype.itemsize
            length = round_up((piece.stop - piece.start) * layout.dtype.itemsize)
            at = job.group.record_offset(region, piece.start)
            job.written = True
            job.writes.append(
                self._store.write(
                    job.group.record, at, at + length, job.image.data_ptr() + first, owner=job.image
                )
            )

    def _complete(self, job: UpdateJob) -> None:
        if job.error is None:
            for region in job.group.regions:
                if any(i in job.pending.hyper for i in region.layout.params):
                    for spec in job.pending.rule.states(region.layout.dtype):
                        state = region.states[spec.name]
                        if state.record.host_only and spec.name not in region.initialised:
                            state.store.mark_written(state.record)
                        region.initialised.add(spec.name)
            if self.gradients is not None:
                self.gradients.give_back(job.pending.gradient)
        self._leave(job)

    def _leave(self, job: UpdateJob) -> None:
        # What waits for the job may need its memory at once: hold nothing of it any more.
        job.image = _NOTHING
        job.gathered = None
        with self._lock:
            self._unfinished.pop(job, None)
            job.done.set()
            self._lock.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            jobs = list(self._unfinished)
            self._jobs.clear()
        for job in jobs:
            job.error = job.error or StateError(f"the update worker failed: {error!r}")
            job.written = True
            self._leave(job)


def _stop_byte(record_bytes: int, stop: int) -> int:
    """``stop`` rounded up to what the store transfers: the record's end or a 4096 boundary."""
    return min(record_bytes, round_up(stop))
