"""Ranks that never come to shard a model with the others, in groups of a mesh too."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ranks import rank_outcomes, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tiermem
from tiermem.errors import StateError, TierMemError

CONFIG = {"device": "cpu", "host_memory": "64MiB", "persistence_threshold_numel": 100}
TIMEOUT_S = 60  # nobody comes later than after 300 s


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))


def split(mesh: Any) -> nn.Module:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(build(), mesh["tp"], plan)


def attempt(mesh: Any, model: nn.Module, config: dict[str, Any], *, raises: bool) -> None:
    with tiermem.Runtime(config) as runtime:
        if raises:
            raise ValueError("a bad start")
        tiermem.shard(model, runtime, mesh=mesh["dp"])
        model(torch.ones(2, 64)).sum().backward()


def fail_once(rank: int, size: int, how: str) -> str:
    """Rank 0 fails as ``how`` says; then all of them try again."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = [split(mesh), split(mesh)]  # torch's own collectives, which are not to differ
    config: dict[str, Any] = dict(CONFIG)
    if rank == 0 and how == "constructor":
        config |= {"paths": ["/missing"], "params": "nvme"}
    if rank == 0 and how == "budget":
        config["host_memory"] = "64KiB"
    try:
        attempt(mesh, models[0], config, raises=rank == 0 and how == "before")
        said = "it worked"
    except (ValueError, TierMemError) as error:
        said = f"{type(error).__name__}: {error}"
    attempt(mesh, models[1], CONFIG, raises=False)
    return said


CAUSES = {
    "constructor": "ConfigError: path '/missing' does not exist",
    "before": "ValueError: a bad start",
    "budget": "BudgetError: host_memory is 64.0 KiB",
}


@pytest.mark.parametrize("how", [*CAUSES])
def test_a_rank_that_fails_before_or_in_shard(how: str) -> None:
    """The others are told, whichever group they wait in, and meet again afterwards."""
    own, *others = [each.value for each in rank_outcomes(fail_once, 4, how, timeout_s=TIMEOUT_S)]
    assert own.startswith(CAUSES[how])
    for said in others:
        assert re.match(f"RankError: rank [0-3] failed: .*{re.escape(CAUSES[how])}", said), said


def read_in_another_order(rank: int, size: int) -> str:
    torch.set_num_threads(1)
    model = build()
    try:
        with tiermem.Runtime(CONFIG) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters())
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            state = optimizer.state[model[0].weight]
            for key in ("exp_avg", "exp_avg_sq") if rank else ("exp_avg_sq", "exp_avg"):
                state[key]
    except StateError as error:
        return str(error)
    return "it worked"


def test_ranks_that_read_states_in_different_order_are_told() -> None:
    for said in run_ranks(read_in_another_order, 2, timeout_s=TIMEOUT_S):
        assert re.match(
            r"ranks disagree .*'0\.weight \(exp_avg(_sq)?\)' after 1 update.*rank == 0", said
        )
        assert said.count("rank 0 waits") + said.count("rank 1 waits") == 2  # nothing twice


def test_processes_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with tiermem.Runtime(CONFIG) as runtime:
        with pytest.raises(StateError, match=r"WORLD_SIZE is 2, but .*init_process_group\('gloo'\)"):
            tiermem.shard(build(), runtime)
        monkeypatch.delenv("WORLD_SIZE")
        tiermem.shard(build(), runtime)
