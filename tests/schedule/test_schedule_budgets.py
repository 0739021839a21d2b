"""Divided budgets: nothing above the budget, and the smallest that is named is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.errors import BudgetError
from tiermem.schedule.placement import (
    DevicePlan,
    GroupSize,
    HostRequest,
    SlotShape,
    plan_beside,
    plan_device,
    plan_host,
)
from tiermem.types import Tier, round_up


def size_of(numel: int, trainable: bool, persistent: bool) -> GroupSize:
    count = numel if trainable else 0
    return GroupSize(
        param_bytes=round_up(numel * 2),
        record_bytes=round_up(numel * 2),
        trainable_numel=count,
        state_bytes=round_up(count * 4) * 2 + round_up(count * 2),
        grad_bytes=round_up(count * 2),
        staged_bytes=round_up(count * 4),
        persistent=persistent,
    )


GROUPS = st.lists(
    st.builds(size_of, st.integers(1, 3_000_000), st.booleans(), st.booleans()), min_size=1, max_size=8
)
SLOTS = st.sampled_from([SlotShape(10, 4, 3), SlotShape(4 + 2 * 4 / 256, 4, 5, 256 * 1024)])
REQUESTS = st.builds(
    HostRequest,
    total=st.just(1 << 40),
    budget=st.just(1 << 40),
    params=st.sampled_from(list(Tier)),
    optimizer=st.sampled_from(list(Tier)),
    spill_allowed=st.booleans(),
    keep_gradients=st.booleans(),
    slot=SLOTS,
    sub_group_numel=st.one_of(st.none(), st.integers(4096, 1 << 20)),
    transfer_bytes=st.sampled_from([0, 1 << 20]),
    stripe_bytes=st.just(1 << 20),
    resident_limit=st.one_of(st.none(), st.just(0)),
    fill_bytes=st.sampled_from([0, 1 << 20, 64 << 20]),
)


def planned_bytes(groups: list[GroupSize], request: HostRequest, plan) -> float:
    total = request.transfer_bytes + plan.num_slots * plan.slot_bytes
    total += plan.num_staging * plan.staging_bytes
    for index, group in enumerate(groups):
        if group.persistent:
            total += group.grad_bytes
            total += group.state_bytes if request.optimizer is not Tier.DEVICE else 0
            continue
        if request.params is Tier.HOST:
            total += group.param_bytes
        if request.optimizer is Tier.HOST:
            total += group.state_bytes
        if index in plan.kept_gradients:
            total += group.grad_bytes
        if request.params is Tier.NVME:
            total += group.param_bytes * plan.param_fraction
        if request.optimizer is Tier.NVME:
            total += group.state_bytes * plan.state_fraction
    return total


def records_bytes(groups: list[GroupSize], request: HostRequest, plan) -> float:
    """What is taken while groups are filled, before there are slots and gradients."""
    bare = replace(plan, num_slots=0, num_staging=0, kept_gradients=frozenset())
    return planned_bytes([replace(g, grad_bytes=0) for g in groups], request, bare)


@given(GROUPS, REQUESTS, st.integers(0, 300 << 20))
def test_all_parts_fit_and_the_smallest_budget_is_exact(groups, request, extra: int) -> None:
    smallest = plan_host(groups, request).smallest_budget
    for budget in (smallest, smallest + extra):
        asked = replace(request, total=budget, budget=budget)
        plan = plan_host(groups, asked)
        assert planned_bytes(groups, asked, plan) <= budget
        assert records_bytes(groups, asked, plan) + request.fill_bytes <= budget
    if smallest:
        with pytest.raises(BudgetError, match=str(smallest)):
            plan_host(groups, replace(request, total=smallest - 1, budget=smallest - 1))


@given(GROUPS, st.integers(0, 1 << 24), st.one_of(st.none(), st.integers(0, 1 << 24)))
def test_device_budget(groups, extra: int, prefetch: int | None) -> None:
    working = max((g.param_bytes for g in groups if not g.persistent), default=0)
    smallest = plan_device(groups, working, None, prefetch).smallest_budget
    plan = plan_device(groups, working, smallest + extra, prefetch)
    assert plan.persistent_bytes + working + plan.ahead_bytes <= plan.budget
    if prefetch is not None:
        assert plan.ahead_bytes <= prefetch
    if smallest:
        with pytest.raises(BudgetError, match=str(smallest)):
            plan_device(groups, working, smallest - 1, prefetch)


ADVICE = [
    (Tier.HOST, Tier.NVME, {}, "or move params to 'nvme'"),
    (Tier.NVME, Tier.HOST, {}, "or move optimizer to 'nvme'"),
    (Tier.HOST, Tier.HOST, {"spill_allowed": False}, "or move params and optimizer to 'nvme'"),
    (Tier.DEVICE, Tier.DEVICE, {"spill_allowed": False}, "or move optimizer to 'nvme', so that"),
    (
        Tier.NVME,
        Tier.NVME,
        {},
        "or wrap smaller modules: the largest unit's gradients alone take 3.8 MiB",
    ),
    (
        Tier.NVME,
        Tier.NVME,
        {"sub_group_numel": 1 << 20},
        r"lower sub_group_numel \(now 1048576\), or wrap",
    ),
]


@pytest.mark.parametrize(("params", "optimizer", "changes", "advice"), ADVICE)
def test_advice_fits_the_placement(params: Tier, optimizer: Tier, changes: dict, advice: str) -> None:
    groups = [size_of(1_000_000, True, False), size_of(4096, True, True)]
    request = HostRequest(
        total=8192,
        budget=8192,
        params=params,
        optimizer=optimizer,
        spill_allowed=True,
        keep_gradients=True,
        slot=SlotShape(10, 4, 3),
        sub_group_numel=None,
        transfer_bytes=0,
        stripe_bytes=1 << 20,
        resident_limit=None,
    )
    with pytest.raises(BudgetError, match=f"Remedy: raise host_memory, {advice}") as caught:
        plan_host(groups, replace(request, **changes))
    if params is optimizer is Tier.NVME:
        assert "nvme" not in str(caught.value)


PLANS = st.builds(
    DevicePlan,
    budget=st.integers(0, 1000),
    persistent_bytes=st.integers(0, 300),
    ahead_bytes=st.integers(0, 300),
    smallest_budget=st.integers(300, 600),
    states_bytes=st.integers(0, 100),
)


@given(PLANS, PLANS)
def test_a_second_model_takes_from_what_is_fetched_ahead(first: DevicePlan, second: DevicePlan) -> None:
    both = plan_beside(first, second)
    assert both.budget == first.budget
    assert both.persistent_bytes == first.persistent_bytes + second.persistent_bytes
    assert 0 <= both.ahead_bytes <= first.ahead_bytes
    needed = first.smallest_budget + second.smallest_budget
    assert both.ahead_bytes == 0 or needed + both.ahead_bytes <= first.budget
