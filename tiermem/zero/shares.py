"""The end of a gather over several ranks: each gives all others its shard, and takes theirs.

[Note: commitments] Over several ranks a gather ends with an exchange (see [Note: whole leases] in
group.py). Exchanges may begin at different times on different ranks, but each rank must make the same
ones. A use makes one if the lease is not whole. One that is made ahead of its use is *committed* at
a point that all ranks pass alike, for the groups that the trace names next in this pass, whether or
not their memory and their shard are at hand yet; it then comes to pass in any case, before the
group is used, updated, or given up. Nothing is committed across an optimizer step, which would make
it out of date.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiermem.comm import Kind
from tiermem.zero.group import ParamGroup
from tiermem.zero.sharing import PATIENCE_S, Exchanges, share_out

if TYPE_CHECKING:
    from tiermem.zero.gather import GatherScheduler
    from tiermem.zero.runtime import Runtime


class SharedShards:
    """See [Note: commitments]. Training thread only."""

    def __init__(self, runtime: Runtime, gather: GatherScheduler) -> None:
        self._runtime = runtime
        self._gather = gather
        self._parting: deque[Exchanges] = deque()  # whose groups have been given up
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
                group.committed = group.ahead = True

    def advance(self) -> None:
        """Starts committed exchanges of groups whose shard is at hand."""
        committed = [g for g in self._runtime.groups if g.committed and not g.under_way]
        if not committed:
            return
        self._gather.poll()
        for group in committed:
            reading = group.transfer is not None and not group.transfer.done()
            updating = group.job is not None or group.pending is not None
            if group.lease is not None and not group.whole and not reading and not updating:
                self._gather.ready(group)
                self._start(group)

    def make_whole(self, group: ParamGroup) -> None:
        """Waits for the shards of all others; this rank's is current."""
        if group.whole:
            return
        if not group.under_way:
            self._start(group)
        started = time.perf_counter()
        assert group.exchange is not None
        if not group.sharded and not group.exchange.received_within(PATIENCE_S):
            self.start_owed()
        if self._runtime.config.overlap_comm:
            group.exchange.wait_received()
        else:
            group.exchange.wait()
        self.stall_seconds += time.perf_counter() - started
        group.whole, group.under_way = True, False

    def start_owed(self) -> None:
        """Gives all others this rank's shards of groups that were updated and not used here since.

        At stages 1 and 2 parameters are whole, so that ranks may use different groups. One that uses a
        group waits for all the others, which give their shard when they wait for another group, or at
        the end of the backward."""
        for group in self._runtime.groups:
            has_all = group.whole or group.under_way or group.sharing.alone
            if not (has_all or group.sharded or group in self._runtime.updates.updated):
                self._gather.gather(group, demand=True)
                self._gather.ready(group)
                self._start(group)

    def honour(self, group: ParamGroup) -> None:
        """Sees to what was committed for ``group``, before its values change."""
        if group.committed:
            self._gather.gather(group, demand=True)
            self._gather.ready(group)
            self.make_whole(group)
            group.committed = False
        elif group.under_way:
            self.make_whole(group)

    def honour_all(self) -> None:
        """Before all leases go: some ranks may have begun what others have not."""
        for group in self._runtime.groups:
            self.honour(group)

    def finish(self, group: ParamGroup) -> None:
        """Afterwards no exchange reads or writes the group's lease."""
        if group.under_way:
            self.make_whole(group)
        if group.exchange is not None:
            exchange, group.exchange = group.exchange, None
            exchange.wait()

    def part(self, group: ParamGroup) -> None:
        """The group has given up its lease, whose memory stays until others have its shard."""
        if group.exchange is not None:
            self._parting.append(group.exchange)
            group.exchange, group.under_way = None, False

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
