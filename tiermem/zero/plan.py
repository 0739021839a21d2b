"""From a model's units to groups and budgets, before anything is moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from tiermem.comm import Communicator
from tiermem.config import TierConfig
from tiermem.schedule.placement import (
    DevicePlan,
    GroupSize,
    HostPlan,
    HostRequest,
    SlotShape,
    plan_device,
    plan_host,
)
from tiermem.types import ALIGNMENT, Tier, round_up
from tiermem.zero.group import ParamGroup
from tiermem.zero.layout import GroupLayout, ParamSpec, RegionLayout, dense_stride, plan_layout
from tiermem.zero.masters import master_itemsize
from tiermem.zero.reduce import MAX_IN_FLIGHT
from tiermem.zero.rule import StatePlan, slot_shape, state_bytes
from tiermem.zero.sharing import Sharing
from tiermem.zero.wrap import PlannedParam, PlannedUnit

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(slots=True, eq=False)
class PlannedGroup:
    """A group before it exists. ``small``: its parameters are below the persistence threshold;
    ``stays``: it never leaves the device; ``anchored``: its unit encloses others, which are used
    while it is, so it keeps its lease."""

    unit: int
    name: str
    params: list[PlannedParam]
    layout: GroupLayout
    sharing: Sharing
    small: bool
    stays: bool
    anchored: bool


def target_dtype(param: torch.Tensor, config: TierConfig) -> torch.dtype:
    """The dtype to compute in: floating-point parameters are cast where the configuration says."""
    if config.compute_dtype is None or not param.dtype.is_floating_point:
        return param.dtype
    return param.dtype if param.dtype.itemsize < 2 else _COMPUTE[config.compute_dtype]


def plan_groups(
    units: Sequence[PlannedUnit], config: TierConfig, comm: Communicator
) -> list[PlannedGroup]:
    """Each unit's parameters as one group, and a second one for its small parameters."""
    result = []
    enclosing = {outer for unit in units for outer in unit.enclosing}
    for index, unit in enumerate(units):
        small = [p for p in unit.params if p.part.numel() < config.persistence_threshold_numel]
        large = [p for p in unit.params if p.part.numel() >= config.persistence_threshold_numel]
        if sum(p.part.numel() for p in large) == 0:
            small, large = [*small, *large], []
        for params, is_small in ((large, False), (small, True)):
            if not params:
                continue
            layout = plan_layout([_spec(p, config) for p in params], comm.size)
            suffix = " (persistent)" if is_small else ""
            stays = is_small or config.params == "device"
            anchored = index in enclosing and not stays
            sharing = Sharing(comm, config.stage, stays)
            result.append(
                PlannedGroup(
                    index, unit.name + suffix, params, layout, sharing, is_small, stays, anchored
                )
            )
    return result


def _spec(planned: PlannedParam, config: TierConfig) -> ParamSpec:
    param, part = planned.param, planned.part
    return ParamSpec(
        planned.name, part.shape, dense_stride(part), target_dtype(param, config), param.requires_grad
    )


def group_size(
    layout: GroupLayout,
    trainable: Sequence[RegionLayout],
    config: TierConfig,
    sharing: Sharing,
    states: StatePlan,
    *,
    small: bool,
) -> GroupSize:
    """What the host budget has to know of one group with these trainable regions."""
    owned = [(sharing.owned(r).numel, r.dtype) for r in trainable]
    narrow = sum(round_up(numel * dtype.itemsize) for numel, dtype in owned)
    wide = sum(round_up(numel * 4) for numel, _ in owned)
    return GroupSize(
        param_bytes=layout.nbytes,
        record_bytes=sum(part.nbytes for part in sharing.record_parts(layout)),
        trainable_numel=sum(numel for numel, _ in owned),
        state_bytes=sum(state_bytes(states(dtype, config), numel) for numel, dtype in owned),
        grad_bytes=wide if config.starts_wide else narrow,
        staged_bytes=wide if config.may_widen else narrow,
        persistent=small,
    )


def host_request(
    config: TierConfig,
    slot: SlotShape,
    *,
    total: int,
    free: int,
    transfer_bytes: int = 0,
    params_paid: bool = False,
) -> HostRequest:
    """The request to divide ``free`` of ``total`` bytes.

    ``transfer_bytes``: for groups on their way to an accelerator; ``params_paid``: parameters have
    their memory already.
    """
    spill = bool(config.paths) and config.uses_nvme
    return HostRequest(
        total=total,
        budget=free,
        params=Tier.DEVICE if params_paid else Tier(config.params),
        optimizer=Tier(config.optimizer),
        spill_allowed=spill,
        keep_gradients=config.effective_update == "deferred",
        slot=slot,
        sub_group_numel=config.sub_group_numel,
        transfer_bytes=transfer_bytes,
        stripe_bytes=int(config.stripe_bytes),
        resident_limit=int(config.resident_memory) if config.resident_memory is not None else None,
    )


def grad_itemsize(regions: Iterable[RegionLayout], config: TierConfig) -> int:
    """The most bytes that a gradient of trainable ``regions`` has when it is used."""
    sizes = [4 if config.may_widen else region.dtype.itemsize for region in regions]
    return max(sizes, default=0)


def plan_for_shard(
    groups: Sequence[PlannedGroup],
    config: TierConfig,
    total: int,
    free: int,
    transfer_groups: int,
    states: StatePlan,
) -> tuple[HostPlan, DevicePlan]:
    """Both budgets, as if an optimizer with ``states`` came for everything trainable.
    ``transfer_groups`` of the largest size may be on their way to an accelerator. Raises
    `BudgetError`."""
    sizes = [_planned_size(group, config, states) for group in groups]
    trainable = [r for g in groups for r in g.layout.regions if r.trainable]
    slot = slot_shape([states(r.dtype, config) for r in trainable], grad_itemsize(trainable, config))
    transfer = transfer_groups * max((round_up(g.layout.nbytes) for g in groups), default=0)
    transfer += reduce_bytes([(g.sharing, g.layout) for g in groups], config)
    request = host_request(config, slot, total=total, free=free, transfer_bytes=transfer)
    host = plan_host(sizes, replace(request, fill_bytes=_fill_bytes(groups, config)))
    held = [replace(size, persistent=group.stays) for group, size in zip(groups, sizes, strict=True)]
    on_device = 0
    if config.optimizer == "device":
        on_device = sum(s.state_bytes + 16 * ALIGNMENT for s in sizes)
    device = plan_device(
        held,
        _working_bytes(groups),
        int(config.device_memory) if config.device_memory is not None else None,
        int(config.prefetch_bytes) if config.prefetch_bytes is not None else None,
        on_device,
    )
    return host, device


def _planned_size(group: PlannedGroup, config: TierConfig, states: StatePlan) -> GroupSize:
    trainable = [r for r in group.layout.regions if r.trainable]
    return group_size(group.layout, trainable, config, group.sharing, states, small=group.small)


def nvme_bytes(
    groups: Sequence[PlannedGroup], config: TierConfig, host: HostPlan, states: StatePlan
) -> int:
    """What the paths have to take, padding aside, as if an optimizer with ``states`` came for
    everything trainable."""
    total = 0.0
    for index, group in enumerate(groups):
        size = _planned_size(group, config, states)
        if config.params == "nvme" and not group.stays:
            total += size.record_bytes * (1 - host.param_fraction)
        if config.optimizer == "nvme" and not group.small:
            total += size.state_bytes * (1 - host.state_fraction)
        spills = config.effective_update == "deferred" and bool(host.num_staging)
        if spills and config.uses_nvme and index not in host.kept_gradients:
            total += size.grad_bytes
    return int(total)


def _fill_bytes(groups: Sequence[PlannedGroup], config: TierConfig) -> int:
    """Host memory for the masters of one group while it is filled."""
    return max(
        (
            sum(
                round_up(r.numel * master_itemsize(r.dtype, config))
                for r in group.layout.regions
                if r.trainable
            )
            for group in groups
        ),
        default=0,
    )


def _working_bytes(groups: Sequence[PlannedGroup]) -> int:
    """What must fit beside persistent groups: all that enclose others, and the largest other."""
    moving = [group for group in groups if not group.stays]
    anchored = sum(round_up(group.layout.nbytes) for group in moving if group.anchored)
    return anchored + max((round_up(g.layout.nbytes) for g in moving if not g.anchored), default=0)


def reduce_bytes(groups: Iterable[tuple[Sharing, GroupLayout]], config: TierConfig) -> int:
    """Host memory for gradients on their way to the ranks that own them; see reduce.py."""
    largest, total = 0, 0
    for sharing, layout in groups:
        if sharing.alone:
            continue
        wide = config.starts_wide and sharing.stage < 2
        full = sum(round_up(r.numel * (4 if wide else r.dtype.itemsize)) for r in layout.regions)
        total += full
        largest = max(largest, full)
    if not largest:
        return 0
    in_flight = MAX_IN_FLIGHT + 1
    late = config.stage < 2 and (config.gradient_accumulation_steps or 1) > 1
    return (total if late else min(total, in_flight * largest)) + MAX_IN_FLIGHT * largest


def existing_size(group: ParamGroup, config: TierConfig, states: StatePlan) -> GroupSize:
    """What an existing group still has to be given: states that have records are paid already."""
    trainable = [region.layout for region in group.regions if region.trainable]
    size = group_size(group.layout, trainable, config, group.sharing, states, small=group.small)
    paid = sum(round_up(s.record.nbytes) for region in group.regions for s in region.states.values())
    attached = group in group.runtime.updates.owners  # then its own gradient buffer is paid too
    return replace(
        size,
        param_bytes=0,
        record_bytes=0,
        state_bytes=max(0, size.state_bytes - paid),
        grad_bytes=0 if attached else size.grad_bytes,
    )
