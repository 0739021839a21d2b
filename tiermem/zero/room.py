"""Room in device memory: whose leases are given up for a gather, and what there is to wait for.

[Note: deterministic room] A sharded group that is given up comes back by an exchange with all ranks, so
all ranks must give up the same ones at the same time, whatever their drives did meanwhile. So what may
lie in device memory is decided by counting, not by what is free: groups that were used since they were
gathered (*live*) keep within the budget without the part that is for groups fetched ahead, and a use
that would exceed it gives up live groups first, chosen by what all ranks know alike (uses, saved
handles, the use trace). What is committed (see [Note: commitments]) keeps within the part for groups
fetched ahead, and is never given up; what is fetched ahead otherwise is this rank's own matter. Then
there is room, perhaps after waiting for releases in flight, and perhaps in pieces: then what is idle
is moved together.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import TYPE_CHECKING

import torch

from tiermem.errors import BudgetError
from tiermem.memory.lease import Lease, LeasePool
from tiermem.schedule.prefetch import choose_victim
from tiermem.types import format_bytes, round_up
from tiermem.zero.group import ParamGroup, ShardedState

if TYPE_CHECKING:
    from tiermem.zero.gather import GatherScheduler
    from tiermem.zero.runtime import Runtime

logger = logging.getLogger(__name__)

_PATIENCE = 50  # looks, 2 ms apart, at views that die in another thread


class DeviceRoom:
    """Finds leases for a `GatherScheduler`. Training thread only."""

    def __init__(self, runtime: Runtime, gather: GatherScheduler) -> None:
        self._runtime = runtime
        self._gather = gather
        self.pool: LeasePool | None = None
        self.lingering: set[ParamGroup] = set()  # see [Note: held parameters]

    @property
    def ahead_bytes(self) -> int:
        """Of device memory, for groups fetched ahead."""
        plan = self._runtime.device_plan
        return 0 if plan is None else plan.ahead_bytes

    def obtain(self, group: ParamGroup, *, demand: bool) -> Lease | None:
        """A lease for ``group``; None if there is no room now and it is not on demand. Raises
        `BudgetError` that names the holders."""
        patience, tried_bytes = _PATIENCE, -1
        while True:
            lease = self._lend(group)
            if lease is not None:
                return lease
            victim = None if group.sharded else self._victim(group, demand=demand)
            if victim is not None:
                self._gather.drop(victim)
                continue
            if not demand:
                return None
            if self._gather.wait_for_release() or self._drop_uncommitted(group):
                continue
            free_bytes = self._free_in_pieces(group)
            if free_bytes not in (0, tried_bytes):
                tried_bytes = free_bytes
                self._move_together(group)
                continue
            if patience == 0:
                raise BudgetError(self._full_message(group))
            patience -= 1
            self._wait_for_views(last=patience == 0)

    def _lend(self, group: ParamGroup) -> Lease | None:
        assert self.pool is not None
        lease = self.pool.lend(group.nbytes, group.name)
        if lease is None:
            self._gather.poll()
            self._gather.shares.release_parted()
            if self.lingering:
                self._sweep_lingering()
            lease = self.pool.lend(group.nbytes, group.name)
        return lease

    def _wait_for_views(self, *, last: bool) -> None:
        """A view may be dying in another thread, or in a reference cycle."""
        if last:
            gc.collect()
            self._sweep_lingering(from_dead_code=True)
        else:
            time.sleep(0.002)

    def _sweep_lingering(self, *, from_dead_code: bool = False) -> None:
        for group in list(self.lingering):
            if group.state is ShardedState.UNSHARDED or group.detach(from_dead_code=from_dead_code):
                self.lingering.discard(group)

    def _victim(self, wanted: ParamGroup, *, demand: bool) -> ParamGroup | None:
        distance = self._gather.trace.distance()
        groups = (g for g in self._runtime.groups if g is not wanted and not g.sharded)
        evictable = {g.index: g for g in groups if self._idle(g)}
        limit = -1 if demand else distance.get(wanted.index, -1)
        index = choose_victim(evictable.keys(), distance, limit)
        if index is not None:
            return evictable[index]
        return self._least_recently_used(wanted) if demand else None

    def _least_recently_used(self, wanted: ParamGroup) -> ParamGroup | None:
        """A group that the running backward has used and may need again."""
        for group in self._runtime.backward.least_recently_used():
            if group is not wanted and group.uses == 0 and group.job is None:
                self._gather.reshard(group)
                return group
        return None

    def _idle(self, group: ParamGroup) -> bool:
        return (
            is_idle(group)
            and not self._runtime.backward.pins(group)
            and (group.transfer is None or group.transfer.done())
        )

    # ---- several ranks, see [Note: deterministic room]

    def make_way(self, group: ParamGroup) -> None:
        """``group`` becomes live: gives up others, so that live groups keep within their part."""
        while True:
            live = [g for g in self._runtime.groups if is_live(g) and g is not group]
            if self._may_live([*live, group]):
                return
            distance = self._gather.trace.distance()
            pins = self._runtime.backward.pins
            idle = {g.index: g for g in live if is_idle(g, or_updating=True) and not pins(g)}
            index = choose_victim(idle.keys(), distance)
            victim = self._least_recently_used(group) if index is None else idle[index]
            if victim is None:
                return  # all are in use: what is fetched ahead may leave room all the same
            self._gather.drop(victim)

    def _may_live(self, groups: list[ParamGroup]) -> bool:
        plan, most = self._runtime.device_plan, self._runtime.config.max_live_numel
        assert plan is not None
        limit_bytes = plan.budget - plan.persistent_bytes - self.ahead_bytes
        if sum(round_up(g.nbytes) for g in groups) > limit_bytes:
            return False
        return most is None or sum(g.numel for g in groups) <= most

    def _drop_uncommitted(self, wanted: ParamGroup) -> bool:
        """Gives up the group that was fetched ahead and is used last, of those that this rank has not
        promised to exchange; False if there is none."""
        committed = self._gather.shares.committed
        groups = (g for g in self._runtime.groups if g is not wanted and g.ahead)
        kept = {
            g.index: g
            for g in groups
            if is_idle(g, or_updating=True) and not (g in committed or g.whole or g.under_way)
        }
        index = choose_victim(kept.keys(), self._gather.trace.distance())
        if index is None:
            return False
        self._gather.drop(kept[index])
        return True

    def _free_in_pieces(self, wanted: ParamGroup) -> int:
        """Free memory (bytes) that is enough for ``wanted``, but not in one piece; 0 if it is not so.
        Alone a rank gives up other groups instead of moving them."""
        assert self.pool is not None
        free_bytes, piece_bytes = self.pool.room()
        return free_bytes if wanted.sharded and piece_bytes < wanted.nbytes <= free_bytes else 0

    def _move_together(self, wanted: ParamGroup) -> None:
        """Free memory is in pieces: groups that nobody computes with are lent anew, side by side, so
        that there is room for ``wanted``. Those whose shards are under way only if it must be, since
        others may send them late."""
        idle = [g for g in self._runtime.groups if g is not wanted and is_idle(g, or_updating=True)]
        logger.info("device memory is in pieces; moving %d groups for %r", len(idle), wanted.name)
        shares = self._gather.shares
        if not self._rearrange([group for group in idle if shares.is_over(group)], wanted):
            shares.start_owed(takes_room=False)
            self._rearrange(idle, wanted)

    def _rearrange(self, groups: list[ParamGroup], wanted: ParamGroup) -> bool:
        """Lends memory to ``groups`` again, behind a place for ``wanted``; False if there is none."""
        contents: dict[ParamGroup, torch.Tensor] = {}
        for group in groups:
            self._gather.finish_moves(group)
        leased = {group: group.lease.address for group in groups if group.lease is not None}
        for group in sorted(leased, key=lambda each: leased[each]):
            assert group.lease is not None
            contents[group] = group.lease.tensor.clone()
            self._gather.take_lease(group, None)
        self._gather.finish_writes()
        by_size = sorted(contents, key=lambda each: -each.nbytes)
        if self._lend_anew(by_size, contents, wanted):
            return True
        if not (self._lend_anew(by_size, contents) or self._lend_anew([*contents], contents)):
            raise BudgetError(self._full_message(wanted))
        return False

    def _lend_anew(
        self,
        order: list[ParamGroup],
        contents: dict[ParamGroup, torch.Tensor],
        wanted: ParamGroup | None = None,
    ) -> bool:
        """False, and no memory to anyone, if they do not fit so."""
        assert self.pool is not None
        first = None if wanted is None else self.pool.lend(wanted.nbytes, wanted.name)
        leases = [self.pool.lend(group.nbytes, group.name) for group in order]
        if None in leases or (first is None) != (wanted is None):
            return False
        for group, lease in zip(order, leases, strict=True):
            assert lease is not None
            lease.tensor.copy_(contents[group])
            self._gather.take_lease(group, lease)
        return True

    def _full_message(self, group: ParamGroup) -> str:
        assert self.pool is not None
        holders = sorted(self.pool.holders().items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in holders[:8])
        plan = self._runtime.device_plan
        budget, states = (plan.budget, plan.states_bytes) if plan is not None else (0, 0)
        if states:
            named = f"optimizer states ({format_bytes(states)}), {named}"
        everything = states + sum(round_up(g.nbytes) for g in self._runtime.groups)
        free, piece = self.pool.room()
        return (
            f"gathering {group.name!r} needs {format_bytes(group.nbytes)}; device_memory is "
            f"{format_bytes(budget)} ({budget} bytes) of which {format_bytes(free)} are free "
            f"({format_bytes(piece)} in one piece), and nothing is being released. Held by: {named}. "
            f"Remedy: gather fewer parameters at once (all units of one checkpointed function are "
            f"needed together), drop references to their views, or raise device_memory: {everything} "
            'holds all (in DeepSpeed\'s configuration {"tiermem": {"device_memory": ...}})'
        )


def is_idle(group: ParamGroup, uses: int = 0, *, or_updating: bool = False) -> bool:
    """Whether nobody computes with the lease of ``group``, but ``uses`` uses that do not count and,
    perhaps, an update."""
    return (
        group.lease is not None
        and not group.persistent
        and not group.anchored
        and group.state is ShardedState.GATHERING
        and group.uses <= uses
        and (group.job is None or or_updating)
    )


def is_live(group: ParamGroup) -> bool:
    """See [Note: deterministic room]."""
    counts = not (group.persistent or group.ahead or group.leaving)
    return group.lease is not None and counts
