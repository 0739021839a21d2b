"""Descriptors, threads and memory stay flat over steps and over runtimes."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from training_rig import Recipe, batches, run_directories, sharded, tier_config, train

import tiermem

Drives = Callable[[int], list[str]]


def descriptors() -> int:
    return psutil.Process().num_fds()


def threads() -> int:
    return psutil.Process().num_threads()


def resident() -> int:
    """Bytes, after the allocator has given back what it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def config_of(drives: Drives, update: str) -> dict[str, Any]:
    return tier_config(
        params="nvme",
        optimizer="nvme",
        paths=drives(2),
        host_memory=4 << 20,
        update=update,
        resident_memory=100_000,
    )


def steps(model: Any, optimizer: Any, count: int) -> None:
    data = batches(4)
    for step in range(count):
        model(*data[step % 4]).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_flat(drives: Drives, update: str, warm_up: int, count: int) -> None:
    with sharded(config_of(drives, update), Recipe()) as (runtime, model, optimizer):
        steps(model, optimizer, warm_up)
        runtime.drain()
        objects = len(gc.get_objects())
        before = descriptors(), threads(), resident()
        files = sum(f.stat().st_size for d in run_directories(drives(2)) for f in d.iterdir())
        steps(model, optimizer, count)
        runtime.drain()
        after = descriptors(), threads(), resident()
        assert after[0] == before[0]
        assert after[1] == before[1]
        assert after[2] - before[2] <= 8 << 20  # 200 steps of gradients alone would be 54 MB
        assert len(gc.get_objects()) - objects < 2000
        assert files == sum(f.stat().st_size for d in run_directories(drives(2)) for f in d.iterdir())


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_nothing_grows_over_steps(update: str, drives: Drives) -> None:
    check_flat(drives, update, 15, 40)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_nothing_grows_over_200_steps(update: str, drives: Drives) -> None:
    check_flat(drives, update, 30, 200)


def test_nothing_grows_over_20_runtimes(drives: Drives) -> None:
    config = config_of(drives, "deferred")
    recipe = Recipe(steps=1)
    for _ in range(3):
        train(config, recipe)
    before = descriptors(), threads(), resident()
    for _ in range(20):
        train(config, recipe)
    after = descriptors(), threads(), resident()
    assert after[0] == before[0]
    assert after[1] == before[1]
    assert after[2] - before[2] <= 16 << 20  # 20 arenas would be more than 80 MB
    assert run_directories(drives(2)) == []


def test_close_ends_every_thread_and_closes_every_file(drives: Drives) -> None:
    train(tier_config(), Recipe(steps=1))  # torch's own threads are there from now on
    before = descriptors(), {t.name for t in threading.enumerate()}, threads()
    train(config_of(drives, "deferred"), Recipe(steps=2))
    assert descriptors() == before[0]
    assert {t.name for t in threading.enumerate()} == before[1]
    assert threads() == before[2]


def test_refused_runs_leave_nothing(drives: Drives) -> None:
    paths = drives(1)
    train(tier_config(), Recipe(steps=1))
    before = descriptors(), threads()
    for changes in (
        {"host_memory": 4096},
        {"device_memory": 4096},
        {"paths": [*paths, "/nowhere"]},
        {"host_memory": 1 << 50},
    ):
        config = tier_config(params="nvme", optimizer="nvme", paths=paths) | changes
        with pytest.raises(tiermem.errors.TierMemError):
            train(config, Recipe(steps=1))
    gc.collect()
    assert (descriptors(), threads()) == before
    assert run_directories(paths) == []


def test_the_runtime_and_the_model_die_with_their_last_reference(drives: Drives) -> None:
    with sharded(config_of(drives, "deferred"), Recipe()) as (runtime, model, optimizer):
        steps(model, optimizer, 2)
        seen = [weakref.ref(runtime), weakref.ref(model), weakref.ref(optimizer)]
    del runtime, model, optimizer
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def test_mappings_of_closed_runtimes_are_gone(drives: Drives) -> None:
    def mappings() -> int:
        return sum(1 for _ in Path("/proc/self/maps").read_text().splitlines())

    config = config_of(drives, "deferred")
    for _ in range(3):
        train(config, Recipe(steps=1))
    gc.collect()
    before = mappings()
    for _ in range(8):
        train(config, Recipe(steps=1))
    gc.collect()
    assert mappings() - before <= 8
