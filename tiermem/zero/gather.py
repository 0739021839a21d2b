"""The gather scheduler: which groups are in device memory, and how they get there.

[Note: gathering] All of this runs on the training thread. A group that was used stays gathered
until its memory is needed (the use trace is a known cycle, so the one used farthest in the future
goes first; room.py). A gather of a group with a pending update starts the update; nobody sees the
parameters before it is done.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from tiermem.errors import BudgetError, StateError
from tiermem.io.base import Op, Priority
from tiermem.memory.arena import Arena
from tiermem.memory.lease import Lease
from tiermem.schedule.prefetch import plan_prefetch
from tiermem.schedule.trace import UseTrace
from tiermem.store.store import TieredStore
from tiermem.store.transfer import Transfer
from tiermem.types import Field, round_up
from tiermem.zero.group import ParamGroup, Region, ShardedState, Transfers
from tiermem.zero.room import DeviceRoom, is_idle
from tiermem.zero.shares import SharedShards
from tiermem.zero.staging import HostImages
from tiermem.zero.update import UpdateJob, UpdatePipeline

if TYPE_CHECKING:
    from tiermem.zero.runtime import Runtime

logger = logging.getLogger(__name__)


class GatherScheduler:
    """See [Note: gathering]."""

    def __init__(
        self, runtime: Runtime, store: TieredStore, pipeline: UpdatePipeline, host: Arena
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._pipeline = pipeline
        self._images = HostImages(host, self.wait_for_release)
        self.room = DeviceRoom(runtime, self)
        self.groups: list[ParamGroup] = []
        self.by_address: dict[int, ParamGroup] = {}
        self._traces: dict[bool, UseTrace] = {}
        self.trace = UseTrace()
        self._lease_writes: deque[Transfer] = deque()
        self.shares = SharedShards(runtime, self)
        self.stall_seconds = 0.0
        self.prefetch_hits = 0
        self.prefetch_misses = 0

    # ---- uses

    def begin_pass(self, training: bool) -> None:
        """An outermost forward begins; with or without gradients are different cycles."""
        self.trace = self._traces.setdefault(training, UseTrace())
        self.trace.begin()

    def unshard_together(self, groups: Sequence[ParamGroup], *, traced: bool = True) -> None:
        """All of ``groups``, which the caller has counted as used once more, unsharded at once."""
        self.fetch_together(groups, traced=traced)
        for group in groups:
            if group.state is not ShardedState.UNSHARDED:
                group.swap_in()

    def fetch_together(self, groups: Sequence[ParamGroup], *, traced: bool = True) -> None:
        """All of ``groups``, which the caller has counted as used once more, in their leases at once.

        Where earlier leases have left the free memory in pieces, everything that can goes and the
        groups are gathered again one beside the other."""
        try:
            for group in groups:
                self._bring(group, traced=traced)
        except BudgetError:
            if len(groups) < 2 or any(group.sharded for group in groups):
                raise
            self.vacate(groups)
            for group in groups:
                self._bring(group, traced=False)

    def _bring(self, group: ParamGroup, *, traced: bool) -> None:
        if group.state is not ShardedState.UNSHARDED or group.pending is not None or not group.whole:
            self.fetch(group, traced=traced)

    def vacate(self, groups: Sequence[ParamGroup] = ()) -> None:
        """Drops every lease that nobody needs now but, perhaps, one use of ``groups``."""
        if any(group.sharded for group in self.groups):  # all ranks drop the same ones
            self.apply_pending()
            self.shares.honour_all()
        for group in self.groups:
            uses = int(group in groups)
            if group.uses > uses or group.job is not None:
                continue
            if group.state is ShardedState.UNSHARDED and not (group.persistent or group.anchored):
                group.swap_out()
            if is_idle(group, uses):
                self.drop(group)
        self.finish_writes()
        while self._images.retire(wait=True):
            pass
        if self.room.pool is not None:
            self.room.pool.reclaim()

    def fetch(self, group: ParamGroup, *, traced: bool = True) -> None:
        """The group's parameters in its lease, up to date."""
        if traced:
            self.trace.use(group.index)
            if group.lease is not None:
                self.prefetch_hits += 1
            else:
                self.prefetch_misses += 1
        if group.sharded and (group.lease is None or group.ahead or group.leaving):
            self.room.make_way(group)
        self.gather(group, demand=True)
        group.ahead = group.leaving = group.owed = False
        self.ready(group)
        self.shares.make_whole(group)
        self.shares.kept(group)

    def reshard(self, group: ParamGroup) -> None:
        """Takes the parameters out of their slots; the lease stays until it is needed."""
        if group.state is ShardedState.UNSHARDED and group.uses == 0:
            group.swap_out()
        most = self._runtime.config.max_reuse_numel
        unused = is_idle(group) and not self._runtime.backward.pins(group)
        if most is not None and unused and self._reuse_numel(group) > most:
            self.drop(group)

    def _reuse_numel(self, group: ParamGroup) -> float:
        """Elements of parameters that are used before ``group`` is used again."""
        before = self.trace.before_next(group.index)
        if before is None:
            return float("inf")
        return sum(self.groups[index].numel for index in before)

    def gather(self, group: ParamGroup, *, demand: bool) -> bool:
        """Starts what brings the group into a lease; False if there is no room (not on demand)."""
        if group.lease is None:
            if not demand and not (self._addressable or self._images.has_room(group.nbytes)):
                return False
            if not demand and self._would_block(group):
                return False
            if demand and group.sharded:
                self.shares.take_room(before=group)
                if group not in self.shares.committed:
                    self.room.make_way(group)
            lease = self.room.obtain(group, demand=demand)
            if lease is None:
                return False
            group.ahead = group in self.shares.committed or not demand
            self._start_read(group, lease, demand=demand)
        if group.pending is not None and group.job is None:
            self._start_update(group)
        return True

    def update_now(self, group: ParamGroup) -> None:
        """Starts the group's pending update inside backward. Over several ranks only this rank's shard
        of its lease will be current then: it is given up when the update is done, which is at another
        time on each rank, and does not count as live until then."""
        group.leaving = group.sharded and group.uses == 0 and not group.anchored
        self.gather(group, demand=True)

    def _would_block(self, group: ParamGroup) -> bool:
        record = group.record
        return record is not None and self._store.would_wait(record, 0, group.record_bytes, Op.READ)

    def _start_read(self, group: ParamGroup, lease: Lease, *, demand: bool) -> None:
        assert group.record is not None
        image = lease.tensor if self._addressable else self._images.make(group)
        self.take_lease(group, lease)
        group.whole = not group.sharded
        group.move(ShardedState.GATHERING)
        parts: list[Transfer] = []
        try:
            for part in group.record_parts:
                parts.append(
                    self._store.read(
                        group.record,
                        part.record_offset,
                        part.record_offset + part.nbytes,
                        image.data_ptr() + part.buffer_offset,
                        owner=image,
                        priority=Priority.DEMAND if demand else Priority.BACKGROUND,
                    )
                )
            group.transfer = Transfers(parts)
        except BaseException:
            for transfer in parts:
                transfer.complete()
            self._forget(group)
            del lease, image  # a kept traceback must not keep the memory
            self._store.raise_failed()
            raise

    def _start_update(self, group: ParamGroup) -> None:
        assert group.pending is not None
        assert group.lease is not None
        self.shares.finish(group)  # others may still be reading the old values
        image = group.lease.tensor if self._addressable else self._images.find(group)
        if image is None:
            image = self._images.make(group)
            image.copy_(group.lease.tensor[: image.numel()])
        self._runtime.gradients.pin(group.pending.gradient)
        group.job = UpdateJob(group, group.pending, image, group.transfer)
        self._pipeline.enqueue(group.job)

    @property
    def _addressable(self) -> bool:
        assert self.room.pool is not None
        return self.room.pool.host_addressable

    def ready(self, group: ParamGroup) -> None:
        """Waits until the group's read and update are done. Raises their error."""
        if group.transfer is None and group.job is None:
            return
        started = time.perf_counter()
        try:
            if group.job is not None:
                self._finish_job(group)
            elif group.transfer is not None:
                self._finish_read(group)
        finally:
            self.stall_seconds += time.perf_counter() - started

    def _finish_read(self, group: ParamGroup) -> None:
        assert group.transfer is not None
        try:
            group.transfer.wait()
        except BaseException as error:
            self._forget(group)
            self._runtime.updates.fetch_failed(error)
            raise
        group.transfer = None
        self._images.deliver(group, self._lease_writes)

    def _finish_job(self, group: ParamGroup) -> None:
        job = group.job
        assert job is not None
        try:
            self._pipeline.wait(job)
        except Exception as error:
            group.job = None
            if job.written:
                self._runtime.mark_torn(error)
            elif group.record is not None and group.state is not ShardedState.UNSHARDED:
                self._forget(group)  # the update stays pending and can be tried again
            self._runtime.updates.fetch_failed(error)
            self._store.raise_failed()  # what the worker met may be its consequence
            raise
        self._lease_writes.extend(job.writes)
        group.job = group.transfer = group.pending = None
        self._images.deliver(group, self._lease_writes)
        if group.leaving:
            group.leaving = False
            self.drop(group)

    def poll(self) -> None:
        """Notices what has finished by itself."""
        while self._lease_writes and self._lease_writes[0].done():
            self._observe(self._lease_writes.popleft())
        for group in self.groups:
            if group.job is not None and group.job.done.is_set() and group.job.error is None:
                self._finish_job(group)
        self._images.retire(wait=False)
        self._store.reap()

    def _observe(self, write: Transfer) -> None:
        write.complete()
        if write.error is not None:
            self._runtime.check_usable()

    def wait_for_release(self) -> bool:
        """Waits for one release that is in flight; False if there is none."""
        started = time.perf_counter()
        try:
            if self._lease_writes:
                self._observe(self._lease_writes.popleft())
                return True
            if self.shares.finish_oldest():
                return True
            if self._images.retire(wait=True):
                return True
            if self._pipeline.wait_oldest():
                self.poll()
                for group in self.groups:
                    if group.job is not None and group.job.done.is_set():
                        self._finish_job(group)  # raises its error
                return True
            for group in self.groups:
                if group.transfer is not None and group.uses == 0 and not group.transfer.done():
                    self._finish_read(group)
                    return True
            return False
        finally:
            self.stall_seconds += time.perf_counter() - started

    # ---- giving up a lease

    def drop(self, group: ParamGroup) -> None:
        """Gives up the group's lease; what the user wrote goes to the store first."""
        if group.job is not None:
            self._finish_job(group)
        if group.lease is None:
            return  # it was leaving
        if group.transfer is not None:
            self._finish_read(group)
        self.settle(group)
        self._forget(group)

    def _forget(self, group: ParamGroup) -> None:
        self.take_lease(group, None)
        self._images.discard(group)
        group.transfer = None
        self.shares.part(group)
        if group.state is ShardedState.UNSHARDED:
            group.swap_out()
        if group.state is ShardedState.GATHERING:
            group.move(ShardedState.SHARDED)

    def take_lease(self, group: ParamGroup, lease: Lease | None) -> None:
        """The group's memory is ``lease`` from now on."""
        if group.lease is not None:
            self.by_address.pop(group.lease.address, None)
        group.lease = lease
        if lease is not None:
            self.by_address[lease.address] = group

    def finish_moves(self, group: ParamGroup) -> None:
        """Afterwards nothing reads or writes the group's lease."""
        if group.job is not None:
            self._finish_job(group)
        if group.transfer is not None:
            self._finish_read(group)
        self.shares.finish(group, starts_owed=False)

    def settle(self, group: ParamGroup, *, force: bool = False) -> None:
        """Writes back what the user has written into the group's parameters; their masters are
        rebuilt from it. See [Note: lost writes]."""
        if group.lease is None or group.transfer is not None or group.job is not None:
            return
        if group.unsettled:  # a block that decides at its end is open
            return
        group.note_writes()
        if not (group.written or force):
            return
        changed = group.params if force else list(group.written)
        group.version += force
        group.mark_clean()
        self.write_params(group)
        for param in changed:
            self._runtime.states.rebuild_master(param)

    def write_params(self, group: ParamGroup) -> None:
        """The lease's content to the group's record."""
        assert group.lease is not None
        if group.record is None:
            return
        image = group.lease.tensor
        if not self._addressable:
            image = self._images.make(group)
            image.copy_(group.lease.tensor[: image.numel()])
        writes = self._write_parts(group, image)
        self._lease_writes.extend(writes)
        if not self._addressable:
            for _ in writes:
                self._observe(self._lease_writes.pop())
            self._images.discard(group)

    def _write_parts(self, group: ParamGroup, image: torch.Tensor) -> list[Transfer]:
        """Starts writing what the group's record holds of ``image``."""
        assert group.record is not None
        return [
            self._store.write(
                group.record,
                part.record_offset,
                part.record_offset + part.nbytes,
                image.data_ptr() + part.buffer_offset,
                owner=image,
            )
            for part in group.record_parts
        ]

    def build_master(self, group: ParamGroup, region: Region) -> None:
        """Makes the parameters of ``region`` their own masters. All ranks call it alike."""
        self.gather(group, demand=True)
        self.ready(group)
        self._runtime.states.fill(region, Field.MASTER, group.region_view(region))
        if group.sharded and is_idle(group):
            self.drop(group)

    # ---- filling (used by shard)

    def open_for_fill(self, group: ParamGroup) -> torch.Tensor:
        """A lease for a new group, and its zeroed image in host memory."""
        if group.sharded:
            self.room.make_way(group)
        lease = self.room.obtain(group, demand=True)
        assert lease is not None
        image = lease.tensor if self._addressable else self._images.make(group)
        image.zero_()
        self.take_lease(group, lease)
        group.move(ShardedState.GATHERING)
        return image

    def close_fill(self, group: ParamGroup, image: torch.Tensor) -> None:
        """Writes the image, which is whole, to the group's record and delivers it to the device."""
        group.whole = True
        if group.record is not None:
            self._lease_writes.extend(self._write_parts(group, image))
        self._images.deliver(group, self._lease_writes)
        group.mark_clean()

    # ---- ahead of use

    def prefetch(self, *, next_pass: bool = False) -> None:
        """Tops up what is fetched ahead of the present use; with ``next_pass`` an optimizer step has
        just been taken."""
        if self.room.ahead_bytes <= 0:
            return
        upcoming = self.trace.upcoming(len(self.groups))
        sizes = {g.index: 0 if g.persistent else round_up(g.nbytes) for g in self.groups}
        window = plan_prefetch(upcoming, sizes, self.room.ahead_bytes)
        while kept := self.shares.committed_beside(window):  # for a branch that was not taken, say
            smaller = plan_prefetch(upcoming, sizes, self.room.ahead_bytes - kept)
            if len(smaller) == len(window):
                break
            window = smaller  # so that there may be more beside it
        self.shares.commit(window, next_pass=next_pass)
        for group in (self.groups[index] for index in window):
            started = group.lease is not None and (group.pending is None or group.job is not None)
            if not started and not self.gather(group, demand=False):
                break
        self.shares.advance()

    def apply_pending(self, groups: Iterable[ParamGroup] | None = None) -> None:
        """Applies the pending updates of ``groups`` (all), in order of use, and waits."""
        among = list(self.groups if groups is None else groups)
        owed = any(group.owed for group in among)
        todo = [group for group in among if group.pending is not None]
        order = self.trace.distance()
        todo.sort(key=lambda g: order.get(g.index, len(order)))
        for position, group in enumerate(todo):
            self.gather(group, demand=True)
            for following in todo[position + 1 : position + 3]:
                if not self.gather(following, demand=False):
                    break
            self.ready(group)
            if group.sharded:  # it has room only until the next one needs it
                group.ahead = group in self.shares.committed
        for group in among:
            group.owed = False
        if owed:
            self._forget_alike()

    def _forget_alike(self) -> None:
        """Which updates had been applied before differs from rank to rank; what lies in device memory
        must not (see [Note: deterministic room])."""
        for group in self.groups:
            pinned = group in self.shares.committed or self._runtime.backward.pins(group)
            if group.sharded and is_idle(group) and not pinned:
                self.drop(group)

    def finish_writes(self) -> None:
        """Waits for every write-back from a lease."""
        while self._lease_writes:
            self._observe(self._lease_writes.popleft())

    def close(self, on_error: Callable[[Exception], None]) -> None:
        """Gives everything up; errors go to ``on_error`` so that all of it happens."""
        for group in self.groups:
            try:
                job, group.job = group.job, None
                if job is not None:
                    self._pipeline.wait(job)
                elif group.transfer is not None:
                    group.transfer.wait()
            except Exception as error:
                # In a torn run it may have met what is undefined since then.
                if not (self._runtime.torn and isinstance(error, StateError)):
                    on_error(error)
            group.transfer = None
        while self._lease_writes:
            self._lease_writes.popleft().complete()  # the store raises what failed
        while self._images.retire(wait=True):
            pass
        for group in self.groups:
            group.uses = 0
            for param in group.params:
                param.stop_listening()
            try:
                self._forget(group)
            except Exception as error:  # tensors that a torch.func transform has left behind, say
                on_error(error)
