"""What overlapping computation and communication is worth on a link of a known rate."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from link_rig import LINK_BYTES_PER_S, torchrun_on_slow_link
from torch import nn

import tiermem

BLOCKS, WIDTH = 6, 1024
NBYTES = 2 * WIDTH * WIDTH  # of a block's parameters
GATHER_S = NBYTES / LINK_BYTES_PER_S  # both ranks send half of it


class _Compute(torch.autograd.Function):
    """Takes as long as the link takes for a group: once forwards, twice backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(GATHER_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * GATHER_S)
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_Compute.apply(x))


def measure() -> dict[str, float]:
    """Seconds of the fastest of three steps' forward and backward, with overlap and without."""
    found = {}
    for overlap in (True, False):
        model = nn.Sequential(*[Block() for _ in range(BLOCKS)]).to(torch.bfloat16)
        config = {
            "overlap_comm": overlap,
            "max_reuse_numel": 0,  # backward gathers again
            "persistence_threshold_numel": 0,
            "host_memory": "128MiB",
            "device": "cpu",
        }
        with tiermem.Runtime(config) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters())
            times = []
            for _ in range(4):
                x = torch.ones(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
                start = time.monotonic()
                model(x).float().sum().backward()
                times.append(time.monotonic() - start)
                optimizer.step()
                optimizer.zero_grad()
        found["together" if overlap else "apart"] = min(times[1:])  # the first learns the order
    return found


@pytest.mark.slow
def test_overlap_on_a_slow_link() -> None:
    """Per block the link is busy once forwards and twice (gather, reduction) backwards, and so is the
    rank. One after the other that is 2 + 4 times a gather; at the same time 1 + 2, but for the first
    gather and the last reduction, which nothing hides."""
    done = torchrun_on_slow_link(__file__)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2
    for found in lines:
        assert found["apart"] > 0.9 * (2 + 4) * BLOCKS * GATHER_S
        assert found["together"] > 0.9 * (1 + 2) * BLOCKS * GATHER_S
        assert found["together"] < 0.7 * found["apart"]


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    print(json.dumps(measure()), flush=True)
    torch.distributed.destroy_process_group()
