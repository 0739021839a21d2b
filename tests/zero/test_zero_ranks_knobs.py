"""What each knob of the communication changes, by what its definition says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import tiermem
from tiermem.comm import Kind
from tiermem.types import Purpose, Tier

BLOCKS, WIDTH = 6, 128
NUMEL = WIDTH * WIDTH  # of a group
NBYTES = 2 * NUMEL
FEW, MORE = 3, 5  # steps

BASE = {"persistence_threshold_numel": 0, "host_memory": "64MiB", "device": "cpu"}
WIDE = {"device_memory": 20 * NBYTES, "prefetch_bytes": 0}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduce buckets": {"reduce_bucket_numel": NUMEL // 4},
    "allgather buckets": {"allgather_bucket_numel": NUMEL // 4},
    "smallest buckets": {"allgather_bucket_numel": 1, "reduce_bucket_numel": 1},
    "no prefetch": {"prefetch_bytes": 0},
    "prefetch two": {"prefetch_bytes": 2 * NBYTES},
    "room": WIDE,
    "two live": {**WIDE, "max_live_numel": 2 * NUMEL},
    "no reuse": {**WIDE, "max_reuse_numel": 0},
    "no overlap": {"overlap_comm": False},
}


@dataclass(frozen=True)
class Seen:
    """Of one rank."""

    exchanges: dict[str, float]  # per step
    in_flight: dict[str, int]
    gathered_peak_bytes: int
    live_numel: int  # the most at a block's forward


def build(width: int = WIDTH, linears: int = 1) -> nn.Module:
    torch.manual_seed(1)
    blocks = [
        nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(linears)], nn.GELU())
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks).to(torch.bfloat16)


def train(config: dict[str, Any], steps: int, rank: int) -> tuple[Any, int, int]:
    model, live = build(), [0]
    with tiermem.Runtime({**BASE, **config}) as runtime:
        tiermem.shard(model, runtime)

        def look(*_: Any) -> None:
            live.append(sum(g.numel for g in runtime.groups if g.lease is not None))

        for block in model:
            block.register_forward_hook(look)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 2 + rank))
            x = x.to(torch.bfloat16).requires_grad_()  # so that every block's weight is needed again
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        tiers = runtime.ledger.snapshot().tiers
        peak = tiers[Tier.DEVICE].by_purpose[Purpose.GATHER].peak_bytes
        assert len(runtime.groups) == BLOCKS
        (communicator,) = runtime.communicators
    return communicator.stats(), peak, max(live)


def measure(rank: int, size: int) -> dict[str, Seen]:
    found = {}
    for name, config in RUNS.items():
        few, _, _ = train(config, FEW, rank)
        more, peak, live = train(config, MORE, rank)
        per_step = {
            kind.name: (more.by_kind[kind].exchanges - few.by_kind[kind].exchanges) / (MORE - FEW)
            for kind in Kind
        }
        in_flight = {kind.name: more.by_kind[kind].max_in_flight_bytes for kind in Kind}
        found[name] = Seen(per_step, in_flight, peak, live)
    return found


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Seen]]:
    """By rank."""
    return run_ranks(measure, 2, timeout_s=150)


def test_reduce_buckets(seen: list[dict[str, Seen]]) -> None:
    """Four buckets a group; of each of two groups two are in flight, in both directions."""
    for rank in seen:
        assert rank["plain"].exchanges["GRADIENTS"] == BLOCKS
        assert rank["reduce buckets"].exchanges["GRADIENTS"] == 4 * BLOCKS
        shard = NBYTES // 2
        assert rank["plain"].in_flight["GRADIENTS"] == 2 * 2 * shard
        assert rank["reduce buckets"].in_flight["GRADIENTS"] == 2 * 2 * (2 * shard // 4)


def test_allgather_buckets(seen: list[dict[str, Seen]]) -> None:
    for rank in seen:
        assert rank["allgather buckets"].exchanges["PARAMS"] == 4 * rank["plain"].exchanges["PARAMS"]


def test_smallest_buckets(seen: list[dict[str, Seen]]) -> None:
    """Are of 4096 bytes of each rank."""
    for rank in seen:
        for kind in ("PARAMS", "GRADIENTS"):
            pieces = NBYTES // 2 // 4096
            assert rank["smallest buckets"].exchanges[kind] == pieces * rank["plain"].exchanges[kind]


def test_prefetch(seen: list[dict[str, Seen]]) -> None:
    """One group in use, and what is fetched ahead of it."""
    for rank in seen:
        assert rank["no prefetch"].gathered_peak_bytes == NBYTES
        assert rank["prefetch two"].gathered_peak_bytes == 3 * NBYTES


def test_live(seen: list[dict[str, Seen]]) -> None:
    for rank in seen:
        assert rank["room"].live_numel == BLOCKS * NUMEL
        assert rank["two live"].live_numel == 2 * NUMEL


def test_reuse(seen: list[dict[str, Seen]]) -> None:
    """With room parameters stay for the backward; without reuse only the last block's do, which is
    used twice in a row."""
    for rank in seen:
        assert rank["room"].exchanges["PARAMS"] == BLOCKS
        assert rank["no reuse"].exchanges["PARAMS"] == 2 * BLOCKS - 1


def test_overlap(seen: list[dict[str, Seen]]) -> None:
    """Without it one exchange at a time is under way: nothing runs ahead of what needs it."""
    for rank in seen:
        for kind in ("PARAMS", "GRADIENTS"):
            assert rank["no overlap"].in_flight[kind] == NBYTES
            assert rank["plain"].in_flight[kind] > NBYTES
            assert rank["no overlap"].exchanges[kind] == rank["plain"].exchanges[kind]


def accumulate(rank: int, size: int) -> list[int]:
    """Bytes of gradient buffers when the last gradient of the last block has just been made."""
    found = []
    for contiguous in (True, False):
        model = build(linears=3)
        config = {"stage": 2, "contiguous_gradients": contiguous}
        with tiermem.Runtime({**BASE, **config}) as runtime:
            tiermem.shard(model, runtime)
            tiermem.optim.AdamW(model.parameters(), lr=1e-3)

            def look(_: torch.Tensor, runtime: Any = runtime) -> None:
                usage = runtime.ledger.snapshot().tiers[Tier.HOST].by_purpose[Purpose.GRADIENT]
                found.append(usage.used_bytes)

            first = next(model[-1].parameters())
            first.register_post_accumulate_grad_hook(look)
            model(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
    return found


def test_contiguous_gradients() -> None:
    """The block's buffer is there from its first gradient on, or only when all are made."""
    for with_buffer, without in run_ranks(accumulate, 2):
        assert with_buffer - without == 3 * NBYTES


def step_and_drain(rank: int, size: int) -> list[list[float]]:
    """Room for four groups, three of them ahead: all updates at once find these in the way."""
    losses: list[list[float]] = []
    for drains in (True, False):
        model = build()
        config = {"device_memory": 4 * NBYTES, "prefetch_bytes": 3 * NBYTES, "max_reuse_numel": 0}
        losses.append([])
        with tiermem.Runtime({**BASE, **config}) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(5):
                loss = model(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().square().mean()
                loss.backward()
                losses[-1].append(loss.item())
                time.sleep(0.05)  # what was given up is sent by now: there is room to fetch ahead
                optimizer.step()
                optimizer.zero_grad()
                if drains:
                    runtime.drain()
    return losses


def test_updates_at_once_beside_what_is_fetched_ahead() -> None:
    for drained, not_drained in run_ranks(step_and_drain, 2):
        assert drained == not_drained
