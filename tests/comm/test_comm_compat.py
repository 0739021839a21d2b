"""Each private or undocumented torch name that is used does what the code relies on."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from ranks import run_ranks
from torch import distributed as dist

from tiermem.comm import compat

FOR_EVER = timedelta(days=365)


def _stores(rank: int, size: int) -> None:
    store = compat.group_store(dist.group.WORLD)
    parts = [compat.group_store(dist.new_group([0, 1])) for _ in range(2)]
    store.set(f"here/{rank}", "world")
    assert store.check([f"here/{rank}"])
    assert not any(part.check([f"here/{rank}"]) for part in parts)
    assert not store.check(["never"])
    below = compat.store_below(store, "below")
    assert below.add("count", 1) in (1, 2)
    while below.add("count", 0) < size:
        time.sleep(0.01)
    assert store.get("below/count") == b"2"


def test_group_store() -> None:
    run_ranks(_stores, 2)


def _connections(rank: int, size: int) -> None:
    """While one connection waits for a key, the one below is free."""
    store = compat.group_store(dist.group.WORLD)
    below = compat.store_below(store, "below")
    thread = threading.Thread(target=store.get, args=("late",))
    thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    below.set("mine", "value")
    assert below.get("mine") == b"value"
    assert time.monotonic() - start < 5
    assert thread.is_alive()
    below.set("other", "value")
    store.clone().set("late", "now")
    thread.join()


def test_store_below() -> None:
    run_ranks(_connections, 1)


def _gloo(rank: int, size: int) -> None:
    store = compat.store_below(compat.group_store(dist.group.WORLD), "gloo")
    transport = compat.open_gloo(store, rank, size, timedelta(seconds=30))
    peer = 1 - rank
    got = torch.zeros(3)
    coming = transport.recv([got], peer, 2**31 - 1)
    going = transport.send([torch.full((3,), float(rank))], peer, 2**31 - 1)
    assert not coming.is_completed()
    coming.wait(FOR_EVER)
    going.wait(FOR_EVER)
    assert coming.is_completed()
    assert (got == peer).all()
    del coming, going
    # Messages of one tag arrive in order, whatever their sizes.
    sizes = (1000, 2000, 3000)
    works = []
    received = [torch.zeros(numel) for numel in sizes]
    for numel, place in zip(sizes, received, strict=True):
        if rank:
            works.append(transport.recv([place], 0, 5))
        else:
            works.append(transport.send([torch.full((numel,), float(numel))], 1, 5))
    for work in works:
        work.wait(FOR_EVER)
    assert rank == 0 or all((each == each.numel()).all() for each in received)
    del work, works
    # Connections close when nobody holds the group or one of its works.
    if rank == 0:
        pending = transport.recv([got], 1, 7)
        with pytest.raises(RuntimeError):
            pending.wait(FOR_EVER)
    else:
        pending = transport.recv([got], 0, 8)
        del pending, transport


def test_open_gloo() -> None:
    run_ranks(_gloo, 2)


def test_every_function_has_a_test() -> None:
    functions = {
        name
        for name, value in vars(compat).items()
        if callable(value)
        and getattr(value, "__module__", "") == compat.__name__
        and not isinstance(value, type)
    }
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert functions <= tests
