"""Ranks whose drives and updates take different times make the same exchanges; see
[Note: deterministic room] and [Note: commitments]."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_rig import WIDTH, Trained, assert_same, batch, build, digest, train
from ranks import run_ranks
from torch import nn

import tiermem
from tiermem.store.transfer import Transfer
from tiermem.zero.update import UpdatePipeline

BASE = {"persistence_threshold_numel": 1000, "host_memory": "64MiB", "device": "cpu", "stage": 3}


@contextmanager
def delays(source: random.Random) -> Iterator[None]:
    """Updates and transfers take longer, at random, in the middle of everything."""
    apply, done = UpdatePipeline._apply, Transfer.done

    def slow_apply(self: UpdatePipeline, piece: Any) -> None:
        if source.random() < 0.3:
            time.sleep(source.random() * 0.01)
        apply(self, piece)

    def late(self: Transfer) -> bool:
        return source.random() < 0.5 and done(self)

    UpdatePipeline._apply, Transfer.done = slow_apply, late  # type: ignore[method-assign]
    try:
        yield
    finally:
        UpdatePipeline._apply, Transfer.done = apply, done  # type: ignore[method-assign]


def nvme(path: str) -> dict[str, Any]:
    return {"params": "nvme", "optimizer": "nvme", "paths": [path], "resident_memory": 0}


def train_unevenly(rank: int, size: int, seeds: range, path: str) -> list[Trained]:
    """One training run per seed."""
    source = random.Random()
    results = []
    with delays(source):
        for seed in seeds:
            choice = random.Random(seed)  # alike on all ranks
            source.seed(1000 * seed + rank)
            config = {**BASE, **choice.choice([nvme(path), {"optimizer": "device"}, nvme(path)])}
            config["sub_group_numel"] = 4096
            config["prefetch_bytes"] = choice.choice([0, 30_000, 60_000, 200_000])
            if choice.random() < 0.5:
                config["max_live_numel"] = choice.choice([1, 20_000, 40_000])
            if choice.random() < 0.5:
                config["max_reuse_numel"] = choice.choice([0, 10_000, 30_000])
            if choice.random() < 0.4:
                config |= {
                    "update": "backward",
                    "gradient_accumulation_steps": 1,
                    "gradient_clipping": 0,
                }
            results.append(train(rank, size, config, steps=4))
    return results


def shard_another_between_steps(rank: int, size: int, path: str) -> list[str]:
    """A second model comes while updates of the first are under way; digests of both."""
    digests = []
    source = random.Random()
    for seed in range(6):
        source.seed(1000 * seed + rank)
        config = {**BASE, **nvme(path), "sub_group_numel": 4096, "device_memory": 220 << 10}
        with delays(source), tiermem.Runtime(config) as runtime:
            first = tiermem.shard(build(), runtime)
            one = tiermem.optim.AdamW(first.parameters(), lr=1e-2)
            for step in range(2):
                first(batch(rank, step, torch.bfloat16)).float().square().mean().backward()
                one.step()
                one.zero_grad()
            second = tiermem.shard(build(), runtime)
            two = tiermem.optim.AdamW(second.parameters(), lr=1e-2)
            for step in range(2):
                x = batch(rank, step, torch.bfloat16)
                (first(x) * second(x)).float().mean().backward()
                for optimizer in (one, two):
                    optimizer.step()
                    optimizer.zero_grad()
            digests.append(digest((*first.parameters(), *second.parameters())))
    return digests


def test_a_second_model_between_steps(tmp_path: Path) -> None:
    found = run_ranks(shard_another_between_steps, 2, str(tmp_path), timeout_s=200)
    assert len({each for digests in found for each in digests}) == 1


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_ranks_at_different_speeds(seeds: range, tmp_path: Path) -> None:
    for results in run_ranks(train_unevenly, 3, seeds, str(tmp_path), timeout_s=60 + 10 * len(seeds)):
        for result in results:
            assert_same(result, results[0])


class Branches(nn.Module):
    """Blocks of different sizes, of which every forward takes some in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64 * (1 + i % 3)), nn.Linear(64 * (1 + i % 3), WIDTH))
            for i in range(8)
        )

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = x + self.blocks[index](x)
        return x


def digest_of_branches(rank: int, seed: int, config: dict[str, Any], drains: bool) -> str:
    choice = random.Random(seed)  # alike on all ranks
    model = Branches().to(torch.bfloat16)
    with tiermem.Runtime({**BASE, **config}) as runtime:
        tiermem.shard(model, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(8):
            order = (
                choice.sample(range(8), choice.randint(2, 8)) if choice.random() < 0.8 else [*range(8)]
            )
            x = batch(rank, step, torch.bfloat16).requires_grad_()
            model(x, order).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if drains and step % 2:
                runtime.drain()
        return digest(model.parameters())


def take_branches(rank: int, size: int, seeds: range, path: str) -> list[tuple[str, str]]:
    """With all parameters at hand, and with as little room as there may be."""
    torch.set_num_threads(1)
    source, found = random.Random(), []
    for seed in seeds:
        choice = random.Random(seed)
        source.seed(1000 * seed + rank)
        tight: dict[str, Any] = {"prefetch_bytes": choice.choice([60_000, 120_000, 200_000])}
        tight |= choice.choice([nvme(path), {}])
        if choice.random() < 0.5:
            tight["max_reuse_numel"] = choice.choice([0, 10_000])
        roomy = {"device_memory": "64MiB", "overlap_comm": False}
        expected = digest_of_branches(rank, seed, roomy, drains=False)
        with delays(source):
            found.append((expected, digest_of_branches(rank, seed, tight, drains=seed % 2 == 0)))
    return found


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_branches_alike_on_all_ranks(seeds: range, tmp_path: Path) -> None:
    """What was fetched ahead for a branch that is not taken leaves room for the one that is."""
    for results in run_ranks(take_branches, 2, seeds, str(tmp_path), timeout_s=60 + 10 * len(seeds)):
        for expected, found in results:
            assert found == expected
