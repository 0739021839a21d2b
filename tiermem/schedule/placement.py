"""How the host and device budgets are divided. Pure; all sizes in bytes unless named otherwise.

The host budget pays, in this order: records whose tier is HOST; slots of the update pipeline;
gradient buffers; and, with what is left, resident parts of NVMe records. Residency goes by traffic
saved per resident byte (DESIGN: the access pattern is a known cycle, so not by recency): a 16-bit
parameter is read in forward and backward and written once (3 moves a byte and step); gradients
and optimizer states move twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tiermem.errors import BudgetError
from tiermem.types import ALIGNMENT, Tier, format_bytes, round_up

MIN_SUB_GROUP_NUMEL = 65_536
MAX_SUB_GROUP_NUMEL = 4 << 20
PREFERRED_SLOTS = 4
MIN_SLOTS = 2
PREFERRED_STAGING = 3


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What one group costs. ``persistent`` groups never leave the device."""

    param_bytes: int  # gathered
    record_bytes: int  # of its parameters that this rank keeps between uses
    trainable_numel: int
    state_bytes: int  # optimizer states of the whole group
    grad_bytes: int  # gradients as they are kept between backward and update
    staged_bytes: int  # the buffer that takes them while they are accumulated
    persistent: bool


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What a slot of the update pipeline holds for each element: the values of ``num_states`` states,
    ``state_itemsize`` bytes together (a fraction where elements share values), and a gradient. Slices
    start at multiples of ``granule_numel`` elements."""

    state_itemsize: float
    grad_itemsize: int
    num_states: int
    granule_numel: int = ALIGNMENT

    @property
    def itemsize(self) -> float:
        return self.state_itemsize + self.grad_itemsize

    def nbytes(self, numel: int) -> int:
        """Bytes of a slot for ``numel`` elements; each state begins on an aligned address."""
        return round_up(math.ceil(numel * self.itemsize)) + (self.num_states + 1) * ALIGNMENT

    def fit(self, numel: int, largest: int) -> int:
        """``numel`` elements or a little more that slices can have; the largest region's are one."""
        return min(round_up(numel, self.granule_numel), max(round_up(largest), ALIGNMENT))


@dataclass(frozen=True, slots=True)
class HostRequest:
    """What the division has to serve."""

    total: int  # the configured budget
    budget: int  # what of it is free now
    params: Tier
    optimizer: Tier
    spill_allowed: bool  # there are paths to spill gradients to
    keep_gradients: bool  # deferred updates keep them until the next forward
    slot: SlotShape
    sub_group_numel: int | None
    transfer_bytes: int  # for groups on their way to or from an accelerator
    stripe_bytes: int  # resident parts are whole stripe units
    resident_limit: int | None
    fill_bytes: int = 0  # needed once, before there are slots and gradients


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The division of the host budget."""

    sub_group_numel: int
    num_slots: int
    slot_bytes: int
    num_staging: int
    staging_bytes: int
    kept_gradients: frozenset[int]
    param_fraction: float
    state_fraction: float
    smallest_budget: int


def plan_host(groups: Sequence[GroupSize], request: HostRequest) -> HostPlan:
    """Divides ``request.budget``. Raises `BudgetError` with the smallest budget that works."""
    fixed = _fixed_bytes(groups, request)
    streams = [g for g in groups if g.trainable_numel and not g.persistent]
    largest = max((g.trainable_numel for g in streams), default=0)
    needs_slots = bool(streams) and (request.optimizer is Tier.NVME or request.spill_allowed)
    staging_bytes = max((g.staged_bytes for g in streams), default=0)
    all_kept = sum(g.grad_bytes for g in streams)
    must_keep = request.keep_gradients and not request.spill_allowed
    smallest_sub_group = request.slot.fit(request.sub_group_numel or MIN_SUB_GROUP_NUMEL, largest)
    working = all_kept if must_keep else staging_bytes
    if needs_slots:
        working += MIN_SLOTS * request.slot.nbytes(smallest_sub_group)
    smallest = fixed + max(working, request.fill_bytes)
    used = request.total - request.budget
    if request.budget < smallest:
        raise BudgetError(
            f"host_memory is {format_bytes(request.total)} ({request.total} bytes); the smallest "
            f"that works for this model and placement is {format_bytes(smallest + used)} "
            f"({smallest + used} bytes). Remedy: raise host_memory{_other_remedy(request, streams)}"
        )
    free = request.budget - fixed
    sub_group, num_slots = 0, 0
    if needs_slots:
        reserve = all_kept if must_keep else staging_bytes
        sub_group, num_slots = _choose_slots(request, free - reserve, largest, smallest_sub_group)
    slot = request.slot.nbytes(sub_group) if num_slots else 0
    free -= num_slots * slot
    num_staging = 0
    if must_keep:
        free -= all_kept
    elif staging_bytes:
        # What comes now may leave some for residents; once those are paid, all of it is ours.
        share = 0.6 if request.params is not Tier.DEVICE else 1.0
        num_staging = max(1, min(PREFERRED_STAGING, len(streams), int(free * share) // staging_bytes))
        free -= num_staging * staging_bytes
    free = min(free, request.budget - fixed - request.fill_bytes)
    return _with_residents(
        groups,
        request,
        HostPlan(
            sub_group_numel=sub_group,
            num_slots=num_slots,
            slot_bytes=slot,
            num_staging=num_staging,
            staging_bytes=staging_bytes if num_staging else 0,
            kept_gradients=frozenset(
                i for i, g in enumerate(groups) if g.trainable_numel and (g.persistent or must_keep)
            ),
            param_fraction=0.0,
            state_fraction=0.0,
            smallest_budget=smallest,
        ),
        free if request.resident_limit is None else min(free, request.resident_limit),
    )


def _other_remedy(request: HostRequest, streams: Sequence[GroupSize]) -> str:
    """What else would make less host memory do, as things are placed now."""
    on_host = [
        name
        for name, tier in (("params", request.params), ("optimizer", request.optimizer))
        if tier is Tier.HOST
    ]
    if on_host:
        return f", or move {' and '.join(on_host)} to 'nvme'"
    if streams and request.keep_gradients and not request.spill_allowed:
        return ", or move optimizer to 'nvme', so that gradients can go there too"
    remedies = ""
    if request.sub_group_numel is not None:
        remedies = f", lower sub_group_numel (now {request.sub_group_numel})"
    largest = max((group.staged_bytes for group in streams), default=0)
    if largest:
        remedies += ", or wrap smaller modules: the largest unit's gradients alone take "
        remedies += format_bytes(largest)
    return remedies


def _fixed_bytes(groups: Sequence[GroupSize], request: HostRequest) -> int:
    total = request.transfer_bytes
    for group in groups:
        if group.persistent:
            total += group.grad_bytes
            total += group.state_bytes if request.optimizer is not Tier.DEVICE else 0
            continue
        if request.params is Tier.HOST:
            total += group.record_bytes
        if request.optimizer is Tier.HOST:
            total += group.state_bytes
    return total


def _choose_slots(
    request: HostRequest, free: int, largest: int, smallest_sub_group: int
) -> tuple[int, int]:
    """Slots large enough for long transfers, small enough that some are read, computed and written
    at the same time: about 40% of the budget in `PREFERRED_SLOTS` slots."""
    slot = request.slot
    if request.sub_group_numel is not None:
        sub_group = slot.fit(request.sub_group_numel, largest)
    else:
        target = int(request.total * 0.4 / (PREFERRED_SLOTS * slot.itemsize))
        sub_group = _whole_granules(min(target, MAX_SUB_GROUP_NUMEL, largest), slot)
        sub_group = max(sub_group, smallest_sub_group)
    num = PREFERRED_SLOTS
    while num > MIN_SLOTS and num * slot.nbytes(sub_group) > free:
        num -= 1
    while num * slot.nbytes(sub_group) > free:
        if request.sub_group_numel is not None or sub_group <= smallest_sub_group:
            needed = num * slot.nbytes(sub_group)
            raise BudgetError(
                f"sub_group_numel {sub_group} needs {format_bytes(needed)} of host memory in {num} "
                f"slots, {format_bytes(free)} are free; lower sub_group_numel or raise host_memory"
            )
        sub_group = max(smallest_sub_group, _whole_granules(sub_group // 2, slot))
    return sub_group, num


def _whole_granules(numel: int, slot: SlotShape) -> int:
    return numel // slot.granule_numel * slot.granule_numel


def _with_residents(
    groups: Sequence[GroupSize], request: HostRequest, plan: HostPlan, free: int
) -> HostPlan:
    """Spends ``free`` on resident parts of NVMe records, best saving per byte first."""
    streams = [(i, g) for i, g in enumerate(groups) if not g.persistent]
    # Records are cut in units, and arenas in pages: keep a margin so that rounding never overflows.
    free = max(0, free - sum(8 * ALIGNMENT for _ in streams) - 2 * request.stripe_bytes)
    param_fraction = state_fraction = 0.0
    kept = set(plan.kept_gradients)
    if request.params is Tier.NVME:
        total = sum(g.record_bytes for _, g in streams)
        param_fraction = _share(free, total)
        free -= int(total * param_fraction)
    if request.keep_gradients and request.spill_allowed:
        for index, group in streams:
            if group.trainable_numel and round_up(group.grad_bytes) <= free:
                kept.add(index)
                free -= round_up(group.grad_bytes)
    if request.optimizer is Tier.NVME:
        state_fraction = _share(free, sum(g.state_bytes for _, g in streams))
    return HostPlan(
        sub_group_numel=plan.sub_group_numel,
        num_slots=plan.num_slots,
        slot_bytes=plan.slot_bytes,
        num_staging=plan.num_staging,
        staging_bytes=plan.staging_bytes,
        kept_gradients=frozenset(kept),
        param_fraction=param_fraction,
        state_fraction=state_fraction,
        smallest_budget=plan.smallest_budget,
    )


def _share(free: int, total: int) -> float:
    """The part of ``total`` that ``free`` bytes hold; small parts are not worth the copies."""
    if total <= 0:
        return 0.0
    share = min(1.0, free / total)
    return share if share >= 0.02 else 0.0


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The division of the device budget. ``persistent_bytes``: parameters that stay, and
    ``states_bytes`` of states."""

    budget: int
    persistent_bytes: int
    ahead_bytes: int
    smallest_budget: int
    states_bytes: int = 0


def plan_device(
    groups: Sequence[GroupSize],
    working_bytes: int,
    budget: int | None,
    prefetch: int | None,
    states_bytes: int = 0,
) -> DevicePlan:
    """Divides the device budget. ``working_bytes`` is the most that one use needs at once (a group
    with the groups that enclose it); ``states_bytes`` of optimizer states lie on the device too.
    Without a budget: room to work and to fetch ahead three groups (or ``prefetch`` bytes). Raises
    `BudgetError` with the smallest budget that works."""
    persistent = states_bytes + sum(round_up(g.param_bytes) for g in groups if g.persistent)
    smallest = persistent + working_bytes
    largest = max((g.param_bytes for g in groups if not g.persistent), default=0)
    if budget is None:
        budget = smallest + (3 * largest if prefetch is None else prefetch)
    if budget < smallest:
        raise BudgetError(
            f"device_memory is {format_bytes(budget)} ({budget} bytes); the smallest that works is "
            f"{format_bytes(smallest)} ({smallest} bytes): {format_bytes(persistent)} of persistent "
            f"parameters and states, and {format_bytes(working_bytes)} for the largest group with "
            f"what encloses it. Raise device_memory, or wrap smaller modules"
        )
    room = budget - smallest
    ahead = room if prefetch is None else min(prefetch, room)
    return DevicePlan(budget, persistent, ahead, smallest, states_bytes)


def plan_beside(first: DevicePlan, second: DevicePlan) -> DevicePlan:
    """The division of the budget of ``first`` among both models. What is fetched ahead gives way to
    what the second needs."""
    persistent = first.persistent_bytes + second.persistent_bytes
    smallest = first.smallest_budget + second.smallest_budget
    return DevicePlan(
        budget=first.budget,
        persistent_bytes=persistent,
        ahead_bytes=max(0, min(first.ahead_bytes, first.budget - smallest)),
        smallest_budget=smallest,
        states_bytes=first.states_bytes + second.states_bytes,
    )
