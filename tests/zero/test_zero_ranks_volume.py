"""Elements that each stage moves in a step, counted exactly (Rajbhandari et al., "ZeRO", SC '20,
section 7), and the bytes of model states that each rank keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import tiermem
from tiermem.comm import CommStats, Kind

BLOCKS, WIDTH = 5, 128  # a block is a multiple of 4 * 4096 bytes: nothing is padded
PSI = BLOCKS * WIDTH * WIDTH
FEW, MORE = 3, 5
MICRO = 3
NARROW, WIDE, STATES = 2, 4, 10  # bytes per element

# stage, micro-steps (declared), clipping: gathers and reductions of all parameters in a step
CASES = {
    (stage, micro, clip): (gathers, reductions)
    for clip in (False, True)
    for stage, micro, gathers, reductions in (
        (0, 1, 0, 2),  # the sums are exchanged too; the update is everybody's own
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (3, 1, 2, 1),
        (0, MICRO, 0, 2),
        (1, MICRO, 1, 1),
        (2, MICRO, 1, MICRO),
        (3, MICRO, 2 * MICRO, MICRO),
    )
}


def train(rank: int, stage: int, micro: int, clip: bool, steps: int) -> tuple[CommStats, int]:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks).to(torch.bfloat16)
    config: dict[str, Any] = {
        "stage": stage,
        "optimizer": "device",
        "device": "cpu",
        "host_memory": "64MiB",
        "persistence_threshold_numel": 0,
        "gradient_accumulation_steps": micro,
        "update": "deferred",
        "max_reuse_numel": 0,
    }
    with tiermem.Runtime(config) as runtime:
        tiermem.shard(model, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            for _ in range(micro):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 2 + rank))
                x = x.to(torch.bfloat16).requires_grad_()
                model(x).float().square().mean().backward()
            if clip:
                optimizer.clip_grad_norm_(1.0)
            kept = kept_bytes(runtime)
            optimizer.step()
            optimizer.zero_grad()
        (communicator,) = runtime.communicators
    return communicator.stats(), kept


def kept_bytes(runtime: Any) -> int:
    """Model states of this rank, gathered parameters aside."""
    total = 0
    for group in runtime.groups:
        total += group.nbytes if group.record is None else group.record.nbytes
        total += sum(own.nbytes for own in (group.gradient, group.partial) if own is not None)
        total += sum(s.record.nbytes for region in group.regions for s in region.states.values())
    return total


def measure(rank: int, size: int) -> dict[Any, Any]:
    found = {}
    for case in CASES:
        few, _ = train(rank, *case, FEW)
        more, kept = train(rank, *case, MORE)
        step = {
            kind.name: (
                (more.by_kind[kind].exchanges - few.by_kind[kind].exchanges) / (MORE - FEW),
                (more.by_kind[kind].sent_bytes - few.by_kind[kind].sent_bytes) / (MORE - FEW),
            )
            for kind in Kind
        }
        found[case] = (step, kept)
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_volume_and_states(size: int) -> None:
    part = PSI * (size - 1) // size  # elements that each rank sends in a collective on all of them
    for rank in run_ranks(measure, size, timeout_s=300):
        for (stage, micro, clip), (step, kept) in rank.items():
            case = f"stage {stage}, {micro} micro-steps, clip {clip}"
            gathers, reductions = CASES[stage, micro, clip]
            itemsize = WIDE if micro > 1 and stage < 2 else NARROW
            # Where a block is used twice in a row, in one backward and the next forward too (if no
            # update comes between), it is not given up.
            saved = (2 * micro - 1) * part // BLOCKS if stage == 3 else 0
            assert step["PARAMS"][1] == (gathers * part - saved) * NARROW, case
            assert step["GRADIENTS"][1] == reductions * part * itemsize, case
            assert step["VALUES"][0] == clip, case
            owned = PSI if stage == 0 else PSI // size
            gradients = owned * (WIDE if micro > 1 else NARROW)
            params = PSI // size if stage == 3 else PSI
            assert kept == params * NARROW + gradients + owned * STATES, case
