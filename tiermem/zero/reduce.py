"""Gradients over several ranks: summed, each rank keeping what it owns.

[Note: reduction] What autograd accumulates on this rank lies in a *partial* buffer of its group,
whole. When the group is done in a backward that reduces (see [Note: stages], sharing.py), every rank
sends each other rank that one's shard and adds up its own: in fp32, in rank order, divided by the
number of ranks, rounded once. So the result does not depend on stage, timing, or the transport. At
stage 0 the sums are then exchanged, so that all ranks have all of them.

[Note: no_sync] Inside ``no_sync()`` nothing is reduced: each rank adds up its own gradients, whole and
in fp32. The first backward outside reduces the sums with its own, group by group as ever; whatever
uses gradients without one (``step()``, a norm, ``full_grad``) reduces them first.

[Note: presence] Which parameters had a gradient may differ from rank to rank (a branch not taken). At
the end of a backward that reduces, ranks tell each other; a parameter that had one anywhere has one
everywhere, with zeros from the others. A group whose parameters all had one needs not wait for that.

[Note: late groups] So a rank may begin a group's reduction in the middle of a backward, and another
one at its end. The first must not wait for the second in between, which may need it to get there (at
stage 3 for its parameters). Where what is in flight has reached its limit, it waits for a moment only;
a group that has not come by then is *late*: it stays in memory and is waited for at the end of the
backward. At that time ranks tell each other which groups not all of them began before; these are late
in the next backward from the start. Results do not depend on any of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tiermem.comm import Communicator, Exchange, Kind, Message
from tiermem.errors import BudgetError
from tiermem.kernels import Kernels
from tiermem.memory.arena import Arena, Block
from tiermem.memory.lease import tensor_over
from tiermem.types import ALIGNMENT, Purpose, format_bytes, round_up
from tiermem.zero.gradients import GradientStore
from tiermem.zero.group_gradient import GroupGradient, flatten_like
from tiermem.zero.layout import Span
from tiermem.zero.sharing import PATIENCE_S, share_out

if TYPE_CHECKING:
    from tiermem.zero.group import ParamGroup, Region
    from tiermem.zero.param import ShardedParam
    from tiermem.zero.runtime import Runtime

_BUCKETS_AT_ONCE = 2

_NONE, _SOME, _BEGUN = range(3)  # what a rank says of a parameter's gradient

MAX_IN_FLIGHT = 2
"""Groups whose reduction may be under way while the next one's gradients accumulate."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The elements [start, stop) of each rank's shard of a region, reduced at a time."""

    region: Region
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class _Reduction:
    """One group's reduction. ``block`` takes what comes for two buckets at a time; ``before``: the
    parameters that had gradients of earlier backwards; ``added``: buckets that are added up."""

    group: ParamGroup
    partial: GroupGradient
    buckets: list[_Bucket]
    block: Block
    parts: list[list[torch.Tensor]] = field(default_factory=list)  # by bucket, in rank order
    exchanges: list[Exchange] = field(default_factory=list)  # by bucket
    before: set[int] | None = None
    added: int = 0
    shared: list[Exchange] | None = None  # of the sums, at stage 0


class GradientReducer:
    """See the notes above. Training thread (and autograd's) only."""

    def __init__(
        self, runtime: Runtime, gradients: GradientStore, arena: Arena, kernels: Kernels
    ) -> None:
        self._runtime = runtime
        self._gradients = gradients
        self._arena = arena
        self._kernels = kernels
        self._in_flight: deque[_Reduction] = deque()
        self._begun: set[ParamGroup] = set()  # in this backward
        self._late: set[ParamGroup] = set()  # see [Note: late groups]
        # Not copied yet, where gradients need not be contiguous; empty between backwards.
        self._loose: dict[ParamGroup, dict[ShardedParam, torch.Tensor]] = {}
        self.micro_steps = 0  # backwards since the last step
        self._steps = 0  # of all optimizers; see [Note: turns] (group.py)
        self.unreduced = False  # one of them did not reduce
        self.syncing = True  # outside of no_sync(), see [Note: no_sync]

    # ---- accumulation

    @property
    def reduces_now(self) -> bool:
        """Whether the running backward reduces."""
        if not self.syncing:
            return False
        declared = self._runtime.config.gradient_accumulation_steps
        late = self._runtime.config.stage < 2 and declared is not None
        return not late or self.micro_steps + 1 >= (declared or 1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See [Note: no_sync]."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def accumulate(self, param: ShardedParam, gradient: torch.Tensor) -> None:
        """Adds one parameter's gradient of this rank (its shape, any dtype)."""
        loose = self._loose.setdefault(param.group, {})
        if not self._runtime.config.contiguous_gradients and param not in loose:
            loose[param] = gradient
            return
        self._copy_loose(param.group)
        self._copy_in(param, gradient)

    def _copy_loose(self, group: ParamGroup) -> None:
        """Copies what autograd has made for ``group`` and was left where it was."""
        for param, gradient in self._loose.pop(group, {}).items():
            self._copy_in(param, gradient)

    def _copy_in(self, param: ShardedParam, gradient: torch.Tensor) -> None:
        group = param.group
        flat = flatten_like(gradient, param.segment.spec.stride)
        own = self._partial(group)
        destination = own.param_view(param)
        again = param.index in own.present
        if flat.device.type != "cpu":
            flat = flat.cpu()
        # In the parameter's precision what comes twice in one backward is rounded twice, as in torch.
        self._kernels.reduce(destination, (flat,), 1.0, add=again)
        own.present.add(param.index)

    def _partial(self, group: ParamGroup) -> GroupGradient:
        """The group's partial gradients; in fp32 if those of several backwards are added up, unless
        the configuration says otherwise."""
        if group.partial is None:
            several = not self.reduces_now or self.unreduced
            wide = several and self._gradients.adds_in_fp32
            own = GroupGradient(group, full=True, widened=wide)
            own.block = self._allocate(own.nbytes, f"gradients of {group.name!r}")
            own.tensor, _ = tensor_over(own.block.address, round_up(own.nbytes))
            group.partial = own
        return group.partial

    def _allocate(self, nbytes: int, what: str) -> Block:
        block = self._arena.allocate(nbytes, Purpose.GRADIENT)
        while block is None and self._in_flight:
            prompt = (r for r in self._in_flight if r.group not in self._late)
            self._finish(next(prompt, self._in_flight[0]))
            block = self._arena.allocate(nbytes, Purpose.GRADIENT)
        while block is None and self._gradients.wait_for_release():
            block = self._arena.allocate(nbytes, Purpose.GRADIENT)
        if block is None:
            raise BudgetError(
                f"{what} need {format_bytes(nbytes)} of host memory before they are reduced, "
                f"{format_bytes(self._arena.free_bytes)} are free "
                f"({format_bytes(self._arena.largest_free)} in one piece). Remedy: raise host_memory"
                + self._other_remedy()
            )
        return block

    def _other_remedy(self) -> str:
        if self.syncing and not self.unreduced:
            return ", or declare gradient_accumulation_steps so that they are planned for"
        return (
            ", or lower resident_memory (gradients that wait for the end of no_sync() are not planned "
            "for), or do without no_sync()"
        )

    def discard(self, group: ParamGroup) -> None:
        """Forgets what ``group`` has accumulated and not reduced."""
        self._loose.pop(group, None)
        own, group.partial = group.partial, None
        if own is not None and own.block is not None:
            self._arena.free(own.block)

    # ---- a backward

    def group_done(self, group: ParamGroup) -> None:
        """The running backward has accumulated all it will into ``group``."""
        self._copy_loose(group)
        own = group.partial
        if own is None or not self.reduces_now:
            return
        if all(p.index in own.present for p in group.params if p.real.requires_grad):
            self._begin(group)

    def end_backward(self) -> None:
        """All groups of a backward are done."""
        for group in list(self._loose):
            self._copy_loose(group)
        if self.reduces_now:
            self._reduce_rest()
        else:
            self.unreduced = True
        self.micro_steps += 1

    def flush(self) -> None:
        """Before gradients are used: reduces what the last backwards have not."""
        if self.unreduced:
            self._reduce_rest()

    def stepped(self) -> None:
        """A step has taken the gradients."""
        self.micro_steps = 0
        self._steps += 1

    def _reduce_rest(self) -> None:
        """See [Note: presence]."""
        self._runtime.gather.shares.start_owed()
        groups: dict[Communicator, list[ParamGroup]] = {}
        for group in self._runtime.groups:
            if not group.sharing.alone and group.trainable_numel:
                groups.setdefault(group.sharing.comm, []).append(group)
        present: dict[ParamGroup, set[int]] = {}
        for comm, members in groups.items():
            present |= self._exchange_presence(comm, members)
        for group, indices in present.items():
            if group in self._begun or not indices:
                continue
            own = self._partial(group)
            for index in indices - own.present:
                own.param_view(group.params[index]).zero_()
                own.present.add(index)
            self._begin(group)
        self._finish_all()
        self._begun.clear()
        self.unreduced = False

    def _exchange_presence(
        self, comm: Communicator, groups: Sequence[ParamGroup]
    ) -> dict[ParamGroup, set[int]]:
        """The parameters of each group that had a gradient on any rank of ``comm``; notices which
        groups are late."""
        params = [param for group in groups for param in group.params]
        mine = torch.tensor([self._presence(param) for param in params], dtype=torch.uint8)
        late: set[ParamGroup] = set()
        every = torch.empty(comm.size, len(params), dtype=torch.uint8)
        every[comm.rank] = mine
        message = Message(Kind.PRESENCE, self._steps % 2, "which gradients there are", self._steps)
        comm.exchange(message, [mine] * comm.size, list(every)).wait()
        least, most = every.amin(0).tolist(), every.amax(0).tolist()
        result: dict[ParamGroup, set[int]] = {group: set() for group in groups}
        for param, low, high in zip(params, least, most, strict=True):
            if high > _NONE:
                result[param.group].add(param.index)
            if param.real.requires_grad and low != _BEGUN:
                late.add(param.group)
        self._late = late | (self._late - set(groups))
        return result

    def _presence(self, param: ShardedParam) -> int:
        if param.group in self._begun and param.real.requires_grad:
            return _BEGUN
        own = param.group.partial
        return _SOME if own is not None and param.index in own.present else _NONE

    # ---- one group

    def _begin(self, group: ParamGroup) -> None:
        """Sends and takes shards of the group's partial gradients."""
        self._limit(MAX_IN_FLIGHT - 1)
        partial, others = group.partial, group.sharing.comm.size - 1
        assert partial is not None
        buckets = self._buckets(group)
        largest = max(round_up((b.stop - b.start) * partial.dtype(b.region).itemsize) for b in buckets)
        slots = min(len(buckets), _BUCKETS_AT_ONCE)
        block = self._allocate(slots * largest * others, f"others' gradients of {group.name!r}")
        group.partial = None
        reduction = _Reduction(group, partial, buckets, block)
        for _ in range(slots):
            self._post(reduction)
        self._begun.add(group)
        self._in_flight.append(reduction)
        if not self._runtime.config.overlap_comm:
            self._limit(0)

    def _limit(self, most: int) -> None:
        """Finishes reductions until at most ``most`` are in flight, late ones aside."""
        for reduction in list(self._in_flight):
            if reduction.group in self._late and self._advance(reduction, within_s=0):
                self._complete(reduction)
        prompt = [r for r in self._in_flight if r.group not in self._late]
        for reduction in prompt[: max(0, len(prompt) - most)]:
            if self._advance(reduction, within_s=PATIENCE_S):
                self._complete(reduction)
            else:
                self._late.add(reduction.group)

    def _finish_all(self) -> None:
        """Waits for everything in flight, in the same order on all ranks."""
        for reduction in sorted(self._in_flight, key=lambda r: r.group.index):
            self._finish(reduction)

    def _buckets(self, group: ParamGroup) -> list[_Bucket]:
        """The group's trainable regions, cut at ``reduce_bucket_numel`` elements of all ranks."""
        most = self._runtime.config.reduce_bucket_numel
        buckets = []
        for region in group.regions:
            numel, step = region.shard.numel, region.shard.numel
            if most is not None:
                unit = ALIGNMENT // region.layout.dtype.itemsize
                step = min(numel, max(unit, most // group.sharing.comm.size // unit * unit))
            if region.trainable:
                buckets += [
                    _Bucket(region, start, min(start + step, numel)) for start in range(0, numel, step)
                ]
        return buckets

    def _post(self, reduction: _Reduction) -> None:
        """Starts the exchange of the next bucket."""
        group, partial, comm = reduction.group, reduction.partial, reduction.group.sharing.comm
        number = len(reduction.exchanges)
        bucket = reduction.buckets[number]
        whole, numel = partial.region_view(bucket.region), bucket.region.shard.numel
        nbytes = (bucket.stop - bucket.start) * whole.element_size()
        slots = min(len(reduction.buckets), _BUCKETS_AT_ONCE)
        at = reduction.block.address + number % slots * (reduction.block.nbytes // slots)
        shards = [
            whole[rank * numel + bucket.start : rank * numel + bucket.stop] for rank in range(comm.size)
        ]
        parts = list(shards)  # this rank's own is where it is
        for rank in range(comm.size):
            if rank != comm.rank:
                parts[rank] = tensor_over(at, nbytes)[0].view(whole.dtype)
                at += nbytes
        message = group.message(Kind.GRADIENTS, bucket.region)
        reduction.exchanges.append(comm.exchange(message, shards, parts))
        reduction.parts.append(parts)

    def _finish(self, reduction: _Reduction) -> None:
        """Waits for it as long as it takes."""
        self._advance(reduction)
        self._complete(reduction)

    def _advance(self, reduction: _Reduction, within_s: float | None = None) -> bool:
        """Adds up what has come of this rank's shard, into the group's gradients; False if not all of
        it came, each bucket ``within_s`` seconds."""
        while reduction.added < len(reduction.buckets):
            number = reduction.added
            exchange = reduction.exchanges[number]
            if within_s is not None and not exchange.received_within(within_s):
                return False
            exchange.wait_received()
            if reduction.before is None:
                reduction.before = self._gradients.open_for_sums(reduction.group, reduction.partial)
            self._add_up(reduction, reduction.buckets[number], reduction.parts[number])
            reduction.added += 1
            if len(reduction.exchanges) < len(reduction.buckets):
                reduction.exchanges[number].wait()  # no more than two buckets are in flight
                self._post(reduction)
        if reduction.group.sharing.stage == 0 and reduction.shared is None:
            reduction.shared = self._share_sums(reduction.group)
        every = reduction.shared or []
        return within_s is None or all(exchange.received_within(within_s) for exchange in every)

    def _complete(self, reduction: _Reduction) -> None:
        """All of this rank's shard is added up."""
        self._in_flight.remove(reduction)
        group, partial = reduction.group, reduction.partial
        for exchange in reduction.exchanges:
            exchange.wait()
        assert group.gradient is not None
        group.gradient.summing = False
        for index in sorted(partial.present):
            self._gradients.sum_squares_of(group.params[index])
        assert partial.block is not None
        self._arena.free(partial.block)
        self._arena.free(reduction.block)
        for exchange in reduction.shared or ():
            exchange.wait()
        self._runtime.updates.complete(group)

    def _add_up(self, reduction: _Reduction, bucket: _Bucket, parts: list[torch.Tensor]) -> None:
        group, region = reduction.group, bucket.region
        assert reduction.before is not None
        first = region.shard.start + bucket.start
        whole = Span(first, region.shard.start + bucket.stop)
        for index in region.layout.params:
            if index in reduction.partial.present:
                segment = group.layout.segments[index]
                mine = whole.meet(segment.start, segment.stop)
                here = slice(mine.start - first, mine.stop - first)
                self._gradients.add_parts(
                    group.params[index],
                    mine,
                    [part[here] for part in parts],
                    add=index in reduction.before,
                )

    def _share_sums(self, group: ParamGroup) -> list[Exchange]:
        own = group.gradient
        assert own is not None
        exchanges: list[Exchange] = []
        for region in group.regions:
            if region.trainable:
                message = group.message(Kind.GRADIENTS, region)
                exchanges += share_out(group.sharing, message, own.region_view(region))
        return exchanges

    def forget_stale(self) -> None:
        """A backward has failed: what it has sent is taken; what it has not stays, as in torch."""
        for group in list(self._loose):
            self._copy_loose(group)
        self._finish_all()
        self._begun.clear()

    def close(self) -> None:
        """Frees every buffer; nothing may be in flight that others still send."""
        for reduction in self._in_flight:
            self._arena.free(reduction.block)
            if reduction.partial.block is not None:
                self._arena.free(reduction.partial.block)
        self._in_flight.clear()
        for group in self._runtime.groups:
            self.discard(group)
