"""A budget is a promise: too small is refused before the first step with the smallest that works,
and it is never exceeded during training."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from training_rig import (
    MODEL,
    Recipe,
    batches,
    make_model,
    run_directories,
    run_steps,
    sharded,
    tier_config,
    train,
)

import tiermem
from tiermem.errors import BudgetError
from tiermem.store.store import TieredStore
from tiermem.types import Tier

Drives = Callable[[int], list[str]]
PAGE = 4096

HOST_CASES: dict[str, dict[str, Any]] = {
    f"{params}-{optimizer}-{update}": {"params": params, "optimizer": optimizer, "update": update}
    for params, optimizer in itertools.product(("device", "host", "nvme"), repeat=2)
    for update in ("deferred", "backward")
} | {
    "nvme-sub-group": {"params": "nvme", "optimizer": "nvme", "sub_group_numel": 12_345},
    "nvme-declared": {"params": "nvme", "optimizer": "nvme", "gradient_accumulation_steps": 1},
    "nvme-accumulating": {"params": "nvme", "optimizer": "nvme", "gradient_accumulation_steps": 3},
    "nvme-fp32": {"params": "nvme", "optimizer": "nvme", "compute_dtype": "fp32"},
    "nvme-nothing-persists": {
        "params": "nvme",
        "optimizer": "nvme",
        "persistence_threshold_numel": 0,
    },
    "nvme-all-persists": {
        "params": "nvme",
        "optimizer": "nvme",
        "persistence_threshold_numel": 1 << 20,
    },
}


def named_smallest(error: BudgetError) -> int:
    found = re.search(r"smallest that works.*?\((\d+) bytes\)", str(error))
    assert found, error
    return int(found[1])


def recipe_for(config: dict[str, Any]) -> Recipe:
    return Recipe(
        config["compute_dtype"], steps=2, micro_steps=config.get("gradient_accumulation_steps", 1)
    )


@pytest.fixture(scope="module")
def expected() -> Callable[[Recipe], str]:
    """The digest of a recipe with room for everything, once for each."""
    cache: dict[str, str] = {}

    def get(recipe: Recipe) -> str:
        if repr(recipe) not in cache:
            cache[repr(recipe)] = train(tier_config(), recipe).digest
        return cache[repr(recipe)]

    return get


@pytest.mark.parametrize("case", HOST_CASES)
def test_host_memory_too_small_names_the_smallest_and_that_one_works(
    case: str, drives: Drives, expected: Callable[[Recipe], str]
) -> None:
    changes = HOST_CASES[case]
    paths = drives(1) if "nvme" in changes.values() else None
    config = tier_config(**changes, paths=paths)
    recipe = recipe_for(config)
    with pytest.raises(BudgetError) as refused:
        train(config | {"host_memory": PAGE}, recipe)
    smallest = named_smallest(refused.value)
    assert smallest > PAGE
    got = train(config | {"host_memory": smallest}, recipe)
    assert got.digest == expected(recipe)
    assert got.stats is not None
    assert got.stats.host.peak <= smallest
    with pytest.raises(BudgetError) as again:
        train(config | {"host_memory": smallest - PAGE}, recipe)
    assert named_smallest(again.value) == smallest
    if paths:
        assert run_directories(paths) == []


@pytest.mark.parametrize("prefetch", [None, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("params", ["host", "nvme", "device"])
@pytest.mark.parametrize("optimizer", ["host", "device"])
def test_device_memory_too_small_names_the_smallest_and_that_one_works(
    optimizer: str,
    params: str,
    prefetch: int | None,
    drives: Drives,
    expected: Callable[[Recipe], str],
) -> None:
    paths = drives(1) if params == "nvme" else None
    config = tier_config(params=params, optimizer=optimizer, paths=paths, prefetch_bytes=prefetch)
    recipe = Recipe(steps=3)
    with pytest.raises(BudgetError) as refused:
        train(config | {"device_memory": PAGE}, recipe)
    smallest = named_smallest(refused.value)
    got = train(config | {"device_memory": smallest}, recipe)
    assert got.digest == expected(recipe)
    assert got.stats is not None
    assert got.stats.device.peak <= smallest
    with pytest.raises(BudgetError, match=rf"device_memory.*\({smallest} bytes\)"):
        train(config | {"device_memory": smallest - PAGE}, recipe)


def test_the_refusal_comes_before_anything_is_changed(drives: Drives) -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = tier_config(params="nvme", optimizer="nvme", paths=drives(1), host_memory=100_000)
    with tiermem.Runtime(config) as runtime, pytest.raises(BudgetError, match="host_memory"):
        tiermem.shard(model, runtime)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with tiermem.Runtime(tier_config()) as runtime:
        tiermem.shard(model, runtime)  # it can be sharded elsewhere


def test_a_host_budget_that_would_swap_is_refused_with_needed_and_available() -> None:
    available = psutil.virtual_memory().available
    with pytest.raises(BudgetError) as refused:
        tiermem.Runtime({"host_memory": 1 << 50})
    numbers = [int(n) for n in re.findall(r"(\d+) bytes", str(refused.value))]
    assert 1 << 50 in numbers
    assert any(0 < n <= available * 1.5 for n in numbers)
    assert "host_memory" in str(refused.value)


def test_the_message_has_value_limit_and_remedy(drives: Drives) -> None:
    config = tier_config(params="host", optimizer="host", host_memory=204_800)
    with pytest.raises(BudgetError, match=r"host_memory is .*204800 bytes.*smallest.*'nvme'"):
        train(config)


def watch_ledger(
    runtime: tiermem.Runtime, model: torch.nn.Module, budgets: dict[Tier, int]
) -> list[int]:
    """Hooks that compare the ledger with the budgets, forward at every module and backward at every
    gradient; the samples of host bytes."""
    samples: list[int] = []

    def look(*_: Any) -> None:
        snapshot = runtime.ledger.snapshot()
        samples.append(snapshot.tiers[Tier.HOST].used_bytes)
        for tier, budget in budgets.items():
            assert snapshot.tiers[tier].used_bytes <= budget
            by_purpose = snapshot.tiers[tier].by_purpose.values()
            assert sum(u.used_bytes for u in by_purpose) == snapshot.tiers[tier].used_bytes

    for module in model.modules():
        module.register_forward_hook(look)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    return samples


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_the_ledger_is_never_above_the_budgets(update: str, drives: Drives) -> None:
    host, device = 2_600_000, 350_000
    config = tier_config(
        params="nvme",
        optimizer="nvme",
        paths=drives(2),
        update=update,
        host_memory=host,
        device_memory=device,
    )
    with sharded(config, Recipe(steps=4)) as (runtime, model, optimizer):
        samples = watch_ledger(runtime, model, {Tier.HOST: host, Tier.DEVICE: device})
        run_steps(model, optimizer, Recipe(steps=4))
        stats = runtime.stats()
    assert len(samples) > 50
    assert stats.host.peak <= stats.host.budget <= host
    assert stats.device.peak <= stats.device.budget <= device
    assert stats.host.peak >= max(samples)


def test_without_a_device_budget_the_leases_stay_within_the_planned_one(drives: Drives) -> None:
    config = tier_config(params="nvme", optimizer="nvme", paths=drives(1))
    with sharded(config, Recipe()) as (runtime, model, optimizer):
        run_steps(model, optimizer, Recipe())
        stats = runtime.stats().device
        assert 0 < stats.peak <= stats.budget < MODEL.num_parameters * 2 * 2


def test_a_full_pool_waits_for_slow_writes_and_goes_on(
    drives: Drives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write completes late; the device budget is the smallest; bits stay the same."""
    recipe = Recipe(steps=3)
    expected = train(tier_config(), recipe)
    config = tier_config(params="nvme", optimizer="nvme", paths=drives(1), resident_memory=0)
    with pytest.raises(BudgetError) as refused:
        train(config | {"device_memory": PAGE}, recipe)
    config["device_memory"] = named_smallest(refused.value)
    original = TieredStore.settle
    waited = []

    def slow(self: TieredStore, transfer: Any) -> None:
        if transfer.op.name == "WRITE" and not transfer.settled:
            waited.append(threading.get_ident())
            time.sleep(0.003)
        original(self, transfer)

    monkeypatch.setattr(TieredStore, "settle", slow)
    got = train(config, recipe)
    assert waited
    assert got.digest == expected.digest
    assert got.stats is not None
    assert got.stats.stall_seconds > 0
    assert got.stats.device.peak <= config["device_memory"]


def test_views_that_are_kept_end_in_a_message_that_names_the_holder(drives: Drives) -> None:
    config = tier_config(params="nvme", optimizer="nvme", paths=drives(1), resident_memory=0)
    recipe = Recipe(steps=1)
    with pytest.raises(BudgetError) as refused:
        train(config | {"device_memory": PAGE}, recipe)
    smallest = named_smallest(refused.value)
    kept: list[torch.Tensor] = []
    with sharded(config | {"device_memory": smallest}, recipe) as (_, model, optimizer):
        handle = model.blocks[0].mlp.up.register_forward_hook(
            lambda module, args, output: kept.append(module.weight.detach()[:1])
        )
        with pytest.raises(BudgetError, match=r"device_memory.*blocks\.0"):
            for batch in batches(3):
                model(*batch)
        handle.remove()
        kept.clear()
        run_steps(model, optimizer, recipe)  # and goes on once they are gone


def test_stats_name_what_lies_where(drives: Drives) -> None:
    config = tier_config(params="nvme", optimizer="nvme", paths=drives(1), host_memory=4 << 20)
    with sharded(config, Recipe()) as (runtime, model, optimizer):
        run_steps(model, optimizer, Recipe(steps=2))
        stats = runtime.stats()
    lower = sum(p.numel() for p in make_model().parameters() if p.numel() >= 300)
    for field, itemsize in (("param", 2), ("master_lo", 2), ("exp_avg", 4), ("exp_avg_sq", 4)):
        assert sum(stats.placement[field].values()) >= lower * itemsize
    assert stats.num_parameters == MODEL.num_parameters
    assert sum(stats.host.by_purpose.values()) == stats.host.used


def test_unlocked_memory_counts_as_unlocked(drives: Drives, tmp_path: Path) -> None:
    with tiermem.Runtime(tier_config(pin_memory=False)) as runtime:
        assert runtime.stats().host.locked == 0


@pytest.mark.parametrize(
    "changes", [{}, {"params": "device"}, {"compute_dtype": "bf16"}, {"prefetch_bytes": 0}]
)
def test_device_states_fit_the_named_smallest_without_persistent_parameters(
    changes: dict[str, Any],
) -> None:
    """The states come when leases have been there: they must not find the memory in pieces."""

    def run(device_memory: int) -> None:
        config = {"optimizer": "device", "persistence_threshold_numel": 0, "host_memory": 64 << 20}
        with tiermem.Runtime(config | changes | {"device_memory": device_memory}) as runtime:
            model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
            optimizer = tiermem.optim.AdamW(tiermem.shard(model, runtime).parameters())
            x = torch.ones(2, 256, dtype=next(model.parameters()).dtype)
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(BudgetError) as refused:
        run(PAGE)
    smallest = named_smallest(refused.value)
    run(smallest)
    with pytest.raises(BudgetError):
        run(smallest - PAGE)
