"""Runtimes and twins for the tests of the gather machinery."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Plain, loss_of
from zero_ranks import CaseRunner
from zero_twins import Loss, Twins, settings

import tiermem

MakeRuntime = Callable[..., tiermem.Runtime]
MakeTwins = Callable[..., Twins]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's own threads only spin beside such small models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_runtime(tmp_path: Path) -> Iterator[MakeRuntime]:
    """Makes runtimes of `settings` with changes, and closes them at the end of the test."""
    made: list[tiermem.Runtime] = []

    def make(**changes: Any) -> tiermem.Runtime:
        made.append(tiermem.Runtime(settings(tmp_path, **changes)))
        return made[-1]

    yield make
    for runtime in made:
        runtime.close()


@pytest.fixture
def make_twins(make_runtime: MakeRuntime) -> MakeTwins:
    """Builds a model twice from the same seed and shards one of the two."""

    def make(
        build: Callable[[], nn.Module] = Plain,
        *,
        loss: Loss = loss_of,
        wrap: Callable[[nn.Module], Any] = lambda model: None,
        runtime: tiermem.Runtime | None = None,
        lr: Any = 1e-2,
        **changes: Any,
    ) -> Twins:
        torch.manual_seed(7)
        plain = build()
        torch.manual_seed(7)
        model = build()
        runtime = runtime or make_runtime(**changes)
        tiermem.shard(model, runtime, wrap=wrap(model))
        return Twins(
            plain,
            model,
            runtime,
            torch.optim.AdamW(plain.parameters(), lr=lr, fused=True),
            tiermem.optim.AdamW(model.parameters(), lr=lr),
            loss,
        )

    return make


@pytest.fixture
def twins(make_twins: MakeTwins) -> Twins:
    """Twins of the plain model in the hardest configuration."""
    return make_twins()


@pytest.fixture(scope="module")
def case_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaseRunner:
    """For a module whose tests have parameters made by `zero_ranks.at_sizes`."""
    mine = [i for i in request.session.items if i.path == request.path and hasattr(i, "callspec")]
    params = [item.callspec.params for item in mine]
    chosen = {(each["name"], each["size"]) for each in params if "size" in each}
    return CaseRunner(tmp_path_factory.mktemp("ranks"), chosen)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A gloo group of this process alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
