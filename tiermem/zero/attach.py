"""Giving an optimizer its records, slots and gradient buffers."""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.errors import StateError
from tiermem.schedule.placement import plan_host
from tiermem.types import Field, round_up
from tiermem.zero.group import ParamGroup
from tiermem.zero.plan import existing_size, grad_itemsize, host_request, reduce_bytes
from tiermem.zero.rule import StatePlan, UpdateRule, slot_shape
from tiermem.zero.runtime import Runtime
from tiermem.zero.shard import add_state
from tiermem.zero.updates import OptimizerLink


def attach_optimizer(
    runtime: Runtime, owner: OptimizerLink, rule: UpdateRule, groups: Sequence[ParamGroup]
) -> None:
    """Makes ``owner`` the optimizer of ``groups``. Raises `BudgetError` with the smallest budget
    that works, `StateError` if a group has an optimizer already; other optimizers then go on."""
    runtime.check_usable()
    taken = [group.name for group in groups if group in runtime.updates.owners]
    if taken:
        raise StateError(
            f"{', '.join(taken[:3])}: has an optimizer already. Remedy: one optimizer for all "
            f"parameters of a unit, or split the units with tiermem.shard(..., wrap=...)"
        )
    runtime.updates.attach = attach_optimizer
    runtime.gather.vacate()  # device states lie beside each other, not around a lease
    try:
        _divide(runtime, rule, groups)
    except BaseException:
        for group in groups:
            group.stages_gradients = False
            runtime.gradients.forget_buffers(group)
        _divide(runtime, rule, ())
        raise
    for group in groups:
        runtime.updates.owners[group] = owner


def _divide(runtime: Runtime, rule: UpdateRule, groups: Sequence[ParamGroup]) -> None:
    """Divides the host budget anew, with what ``groups`` need beside those that have optimizers."""
    config = runtime.config
    runtime.pipeline.release_slots()
    runtime.gradients.release_staging()
    rules = dict.fromkeys(groups, rule)
    rules |= {group: owner.rule for group, owner in runtime.updates.owners.items()}
    trainable = [(r.layout, rule) for g, rule in rules.items() for r in g.regions if r.trainable]
    plan = plan_host(
        [existing_size(group, config, _states_of(rule)) for group, rule in rules.items()],
        host_request(
            config,
            slot_shape(
                [rule.states(layout.dtype) for layout, rule in trainable],
                grad_itemsize([layout for layout, _ in trainable], config),
            ),
            total=runtime.host.nbytes,
            free=runtime.host.free_bytes,
            transfer_bytes=runtime.transfer_groups
            * max((round_up(group.nbytes) for group in runtime.groups), default=0)
            + reduce_bytes([(group.sharing, group.layout) for group in runtime.groups], config),
            params_paid=True,
        ),
    )
    if plan.num_slots:
        runtime.pipeline.configure(plan.num_slots, plan.slot_bytes, plan.sub_group_numel)
    if plan.num_staging:
        runtime.gradients.add_staging(plan.num_staging, plan.staging_bytes)
    runtime.gradients.spills = not runtime.updates.in_backward and config.uses_nvme
    runtime.gradients.may_widen = config.may_widen
    runtime.gradients.start_wide = config.starts_wide
    for index, group in enumerate(groups):
        group.stages_gradients = False
        if index not in plan.kept_gradients and group.trainable_numel and plan.num_staging:
            group.stages_gradients = True
            if not runtime.updates.in_backward:
                runtime.gradients.add_record(group)
        elif group.trainable_numel:
            runtime.gradients.reserve(group)
    for group in groups:  # last: parts of them stay in what host memory is left
        _make_records(runtime, rule, group, plan.state_fraction)


def _states_of(rule: UpdateRule) -> StatePlan:
    return lambda dtype, _: rule.states(dtype)


def _make_records(runtime: Runtime, rule: UpdateRule, group: ParamGroup, fraction: float) -> None:
    for region in group.regions:
        if region.trainable:
            for spec in rule.states(region.layout.dtype):
                add_state(runtime, group, region, spec, fraction)
            if region.master == Field.MASTER and Field.MASTER not in region.initialised:
                runtime.gather.build_master(group, region)  # it was frozen when it was sharded
