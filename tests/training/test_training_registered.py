"""With ``pin_memory`` transfers use registered memory, and only what they touch is pinned."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from training_rig import Recipe, make_model, run_steps, tier_config

import tiermem
from tiermem.io import probe_backends

MIB = 1 << 20
HOST = 1024 * MIB


def pinned_bytes() -> int:
    found = re.search(r"VmPin:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


@pytest.mark.parametrize("pin", [True, False])
def test_pinned(pin: bool, drives: Callable[[int], list[str]]) -> None:
    if (why := probe_backends()["io_uring"]) != "works":
        pytest.skip(why)
    before = pinned_bytes()
    config = tier_config(
        params="nvme",
        optimizer="nvme",
        paths=drives(2),
        host_memory=HOST,
        resident_memory=0,
        pin_memory=pin,
        io={"backend": "io_uring"},
    )
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(make_model(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        run_steps(model, optimizer, Recipe(steps=2))
        runtime.drain()
        said = runtime.engine.registration
        pinned = pinned_bytes() - before
    assert pinned_bytes() == before
    if not pin:
        assert (said, pinned) == ("no memory was given", 0)
        return
    if "registers no more" in said or "takes Linux" in said:
        pytest.skip(said)
    used = re.search(r"used by (\d+) chunks", said)
    assert used is not None
    assert int(used[1]) > 0
    # Each of the two rings pins a slab of 32 MiB of the host's arena and what there is of the device's.
    assert 0 < pinned <= HOST // 4
