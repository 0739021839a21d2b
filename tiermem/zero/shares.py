"""The end of a gather over several ranks: each gives all others its shard, and takes theirs.

[Note: commitments] Over several ranks a gather ends with an exchange (see [Note: whole leases] in
group.py). Exchanges may begin at different times on different ranks, but each rank must make the same
ones. A use makes one if the lease is not whole. One that is made ahead of its use is *committed* at
a point that all ranks pass alike, for the groups that the trace names next in this pass, whether or
not their memory and their shard are at hand yet; it then comes to pass in any case, before the
group is used, updated, or given up. Nothing is committed across an optimizer step, which would make
it out of date.

Room for what is committed is taken in the order of commitment, and before a use takes room for
anything else: so in one order on all ranks. Where memory is in pieces a rank may have to wait for an
exchange that is under way before it can move that lease; then every other rank has room for this group
by the time that it waits itself, and can begin the exchange. So nobody waits in a circle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiermem.comm import Kind
from tiermem.types import round_up
from tiermem.zero.group import ParamGroup
from tiermem.zero.sharing import PATIENCE_S, Exchanges, share_out

if TYPE_CHECKING:
    from tiermem.zero.gather import GatherScheduler
    from tiermem.zero.runtime import Runtime

_MOMENT_S = 0.0005
"""What a thread takes that finds an exchange to be over."""


class SharedShards:
    """See [Note: commitments]. Training thread only."""

    def __init__(self, runtime: Runtime, gather: GatherScheduler) -> None:
        self._runtime = runtime
        self._gather = gather
        self._parting: deque[Exchanges] = deque()  # whose groups have been given up
        self._starting = False
        self.committed: dict[ParamGroup, None] = {}  # in order; until their exchange has come to pass
        self.stall_seconds = 0.0

    def commit(self, window: Sequence[int], *, next_pass: bool) -> None:
        """What is to be exchanged ahead of use: those of ``window`` that are used in this pass, or
        (``next_pass``: a step has just been taken) in the next. All ranks call it alike."""
        groups = self._runtime.groups
        if not self._runtime.config.overlap_comm:
            return
        near = set(self._gather.trace.upcoming(len(groups), next_pass=next_pass))
        for group in (groups[index] for index in window if index in near):
            if not group.sharing.alone and not (group.lease is not None and group.whole):
                group.ahead = True
                self.committed.setdefault(group)

    def kept(self, group: ParamGroup) -> None:
        """The group's exchange has come to pass."""
        self.committed.pop(group, None)

    def take_room(self, *, before: ParamGroup) -> None:
        """Takes leases for what was committed, up to ``before``."""
        for group in list(self.committed):
            if group is before:
                return
            if group.lease is None:
                self._gather.gather(group, demand=True)

    def committed_beside(self, window: Sequence[int]) -> int:
        """Bytes of device memory for what is committed and not in ``window``. Alike on all ranks."""
        beside = (g for g in self.committed if g.index not in window)
        return sum(round_up(group.nbytes) for group in beside if not group.persistent)

    def advance(self) -> None:
        """Starts committed exchanges of groups whose shard is at hand."""
        waiting = [group for group in self.committed if not group.under_way]
        if not waiting:
            return
        self._gather.poll()
        for group in waiting:
            reading = group.transfer is not None and not group.transfer.done()
            updating = group.job is not None or group.pending is not None
            if group.lease is not None and not group.whole and not reading and not updating:
                self._gather.ready(group)
                self._start(group)

    def make_whole(self, group: ParamGroup, *, starts_owed: bool = True) -> None:
        """Waits for the shards of all others; this rank's is current. ``starts_owed``: leases may be
        taken meanwhile for what others may wait for."""
        if group.whole:
            return
        if not group.under_way:
            self._start(group)
        started = time.perf_counter()
        assert group.exchange is not None
        if starts_owed and self._owes(group) and not group.exchange.received_within(PATIENCE_S):
            self.start_owed()
        if self._runtime.config.overlap_comm:
            group.exchange.wait_received()
        else:
            group.exchange.wait()
        self.stall_seconds += time.perf_counter() - started
        group.whole, group.under_way = True, False

    def start_owed(self, *, takes_room: bool = True) -> None:
        """Gives all others this rank's shards of groups that they may wait for: before this rank waits
        for something else, or when that takes long.

        Those are what is committed and not under way, for want of room or of this rank's shard; and at
        stages 1 and 2, where parameters are whole, so that ranks may use different groups, what was
        updated and not used here since."""
        if self._starting:  # room for one of them is made by waiting for another
            return
        self._starting = True
        try:
            for group in dict.fromkeys([*self.committed, *self._runtime.groups]):
                if self._is_owed(group) and (takes_room or group.lease is not None):
                    self._bring(group)
                    self._start(group)
        finally:
            self._starting = False

    def _is_owed(self, group: ParamGroup) -> bool:
        if group.whole or group.under_way or group.sharing.alone:
            return False
        if group in self.committed:
            return True
        return not group.sharded and group not in self._runtime.updates.updated

    def _owes(self, wanted: ParamGroup) -> bool:
        """Whether others may wait for this rank while it waits for ``wanted``."""
        return not wanted.sharded or any(map(self._is_owed, self.committed))

    def honour(self, group: ParamGroup) -> None:
        """Sees to what was committed for ``group``, before its values change."""
        if group in self.committed:
            self._bring(group)
            self.make_whole(group)
            self.kept(group)
        elif group.under_way:
            self.make_whole(group)

    def _bring(self, group: ParamGroup) -> None:
        """This rank's shard into a lease, which it keeps."""
        self._gather.gather(group, demand=True)
        group.leaving = False
        self._gather.ready(group)

    def honour_all(self) -> None:
        """Before all leases go: some ranks may have begun what others have not."""
        for group in self._runtime.groups:
            self.honour(group)

    def finish(self, group: ParamGroup, *, starts_owed: bool = True) -> None:
        """Afterwards no exchange reads or writes the group's lease."""
        if group.under_way:
            self.make_whole(group, starts_owed=starts_owed)
        if group.exchange is not None:
            exchange, group.exchange = group.exchange, None
            exchange.wait()

    def part(self, group: ParamGroup) -> None:
        """The group has given up its lease, whose memory stays until others have its shard."""
        if group.exchange is not None:
            self._parting.append(group.exchange)
            group.exchange, group.under_way = None, False

    def release_parted(self) -> None:
        """Lets leases that were given up go, as far as others have what they get from them."""
        while self._parting and self._parting[0].over_within(_MOMENT_S):
            self._parting.popleft().wait()

    def is_over(self, group: ParamGroup) -> bool:
        """Whether no exchange reads or writes the group's lease."""
        return group.exchange is None or group.exchange.over_within(_MOMENT_S)

    def finish_oldest(self) -> bool:
        """Waits until others have what they get from one lease that was given up; False if there is
        none."""
        if not self._parting:
            return False
        self._parting.popleft().wait()
        return True

    def _start(self, group: ParamGroup) -> None:
        """This rank's shard is current."""
        assert group.lease is not None
        if group.exchange is not None:
            group.exchange.wait()
        most = self._runtime.config.allgather_bucket_numel
        parts = []
        for region in group.regions:
            message = group.message(Kind.PARAMS, region)
            parts += share_out(group.sharing, message, group.region_view(region), most)
        group.exchange, group.under_way = Exchanges(parts, group.lease), True
