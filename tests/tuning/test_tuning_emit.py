"""What is printed as configuration is configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import profile_of

from tiermem.config import load_config
from tiermem.io import BACKENDS
from tiermem.tuning.candidates import CHUNKS, DEPTHS, Candidate
from tiermem.tuning.emit import deepspeed_fragment, tiermem_fragment
from tiermem.tuning.identity import Identity

CANDIDATES = st.builds(
    Candidate,
    st.sampled_from(BACKENDS),
    st.sampled_from(CHUNKS),
    st.sampled_from(DEPTHS),
    st.sampled_from(DEPTHS),
)
SPEEDS = st.lists(st.floats(1e-3, 100), min_size=1, max_size=4)


@given(CANDIDATES, SPEEDS)
def test_ours_loads(settings: Candidate, speeds: list[float]) -> None:
    identities = [Identity("ext4", str(at), ()) for at in range(len(speeds))]
    fragment = json.loads(json.dumps(tiermem_fragment(profile_of(identities, speeds, settings))))
    config = load_config({"params": "nvme", "optimizer": "nvme", **fragment})
    assert [str(path) for path in config.paths] == [f"/drive{at}" for at in range(len(speeds))]
    assert config.io.given == settings.fields()
    assert (config.path_weights is None) == (len(speeds) == 1)


@given(CANDIDATES)
def test_deepspeeds_has_the_keys_and_types_that_it_reads(settings: Candidate) -> None:
    fragment = deepspeed_fragment(profile_of([Identity("ext4", "1", ())], [2.0], settings))
    aio = json.loads(json.dumps(fragment))["aio"]
    types: dict[str, type] = {
        "block_size": int,
        "queue_depth": int,
        "intra_op_parallelism": int,
        "thread_count": int,
        "single_submit": bool,
        "overlap_events": bool,
        "use_gds": bool,
    }
    assert {key: type(value) for key, value in aio.items()} == types
    assert aio["block_size"] == settings.chunk_bytes
    depth = max(settings.read_depth, settings.write_depth)
    assert aio["queue_depth"] == depth
    ours = load_config(fragment).io.given  # it is understood here, too
    assert ours == {"chunk_bytes": settings.chunk_bytes, "read_depth": depth, "write_depth": depth}


def test_ours_runs(tmp_path: Path) -> None:
    tiermem = pytest.importorskip("tiermem")
    pytest.importorskip("torch")
    profile = profile_of([Identity("ext4", "1", ())], [2.0], Candidate("threads", 65536, 2, 3))
    fragment: dict[str, Any] = tiermem_fragment(profile) | {"paths": [str(tmp_path)]}
    config = {"params": "nvme", "optimizer": "nvme", "host_memory": "64MiB", "pin_memory": False}
    with tiermem.Runtime(config | fragment) as runtime:
        assert runtime.stats().io == profile.settings
