"""AdamW with 8-bit moments: the bits of one update of whole tensors, its bytes, and how it trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_rig import PLACEMENTS, inputs, make_net, sharded, take_step
from ranks import run_ranks
from torch import nn

import tiermem
from tiermem.kernels import AdamWStep, Moments8bit
from tiermem.kernels.torch_kernels import TorchKernels

KINDS = {"AdamW8bit": True, "Adam8bit": False}


class Whole:
    """The same optimizer on whole tensors in memory, by the torch kernels."""

    def __init__(self, params: list[torch.Tensor], decoupled: bool, lr: float, decay: float) -> None:
        self.params = params
        self.lr, self.decay, self.decoupled = lr, decay, decoupled
        self.kernels = TorchKernels()
        self.steps = [0] * len(params)
        self.moments = [
            Moments8bit(
                *(torch.zeros(n, dtype=d) for n, d in 2 * [(p.numel(), torch.uint8), (blocks(p), None)])
            )
            for p in params
        ]

    def step(self, grads: list[torch.Tensor | None]) -> None:
        for i, (param, grad, moments) in enumerate(zip(self.params, grads, self.moments, strict=True)):
            if grad is None:
                continue
            self.steps[i] += 1
            hyper = AdamWStep(
                self.lr, 0.9, 0.999, 1e-8, self.decay, self.steps[i], decoupled=self.decoupled
            )
            self.kernels.adamw_8bit(hyper, param.flatten(), None, moments, grad.float().flatten())


def blocks(param: torch.Tensor) -> int:
    return -(-param.numel() // 256)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bits_of_whole_tensors(placement: str, kind: str, tmp_path: Path) -> None:
    """Wherever states are and however regions are cut, blocks are those of each parameter."""
    twin = make_net()
    whole = Whole([p.detach() for p in twin.parameters()], KINDS[kind], 1e-2, 0.1)
    with sharded(tmp_path, placement, sub_group_numel=4096) as (_, ours):
        make: Any = getattr(tiermem.optim, kind)
        optimizer = make(ours.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(4):
            branch = step != 1
            loss = twin(inputs(step), branch).square().mean()
            grads = torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)
            assert take_step(ours, optimizer, step, branch=branch) == float(loss.detach())
            whole.step(list(grads))
        for param, theirs, moments in zip(
            ours.parameters(), twin.parameters(), whole.moments, strict=True
        ):
            assert torch.equal(tiermem.full_param(param), theirs.detach())
            expected = torch.empty(theirs.numel())
            whole.kernels.dequantize(moments.exp_avg, moments.exp_avg_scale, expected, signed=True)
            assert torch.equal(optimizer.state[param]["exp_avg"].flatten(), expected)
            whole.kernels.dequantize(
                moments.exp_avg_sq, moments.exp_avg_sq_scale, expected, signed=False
            )
            assert torch.equal(optimizer.state[param]["exp_avg_sq"].flatten(), expected)


def _wide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1024, 1100), nn.Linear(1100, 64))


@pytest.mark.parametrize("numel", [65_536, None])
def test_scales_on_drives_in_several_slices(numel: int | None, tmp_path: Path) -> None:
    """Slices are as long as whole pages of scales: 262,144 elements."""
    ends = []
    for placement in ("host", "nvme"):
        config = {
            "params": placement,
            "optimizer": placement,
            "paths": [str(tmp_path)] if placement == "nvme" else [],
            "host_memory": "32MiB",
            "device": "cpu",
            "sub_group_numel": numel if placement == "nvme" else None,
            "resident_memory": 0,
            "pin_memory": False,
        }
        with tiermem.Runtime(config) as runtime:
            states = tiermem.optim.AdamW8bit.states_of()
            model = tiermem.shard(_wide(), runtime, states=states)
            optimizer = tiermem.optim.AdamW8bit(model.parameters(), lr=1e-2)
            for step in range(3):
                x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(step))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(
                [tiermem.full_param(p) for p in model.parameters()]
                + [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]
            )
            if placement == "nvme":
                assert runtime.pipeline.sub_group_numel % 262_144 == 0
                assert runtime.stats().placement["exp_avg_scale"]["nvme"] > 0
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(
    ("changes", "k"),
    [
        ({}, 2),
        ({"compute_dtype": "bf16", "master": "split"}, 4),
        ({"compute_dtype": "bf16", "master": "fp32"}, 6),
        ({"compute_dtype": "fp16"}, 6),
    ],
)
def test_bytes_for_each_parameter(changes: Any, k: int, tmp_path: Path) -> None:
    """K = 6 for 16-bit parameters, 4 with split masters; with an fp32 scale for 256 elements each."""
    with tiermem.Runtime({"device": "cpu", "host_memory": "64MiB", **changes}) as runtime:
        model = tiermem.shard(_wide(), runtime)
        optimizer = tiermem.optim.AdamW8bit(model.parameters(), lr=1e-3)
        loss = model(torch.ones(1, 1024).to(next(model.parameters()).dtype)).float().sum()
        optimizer.scale(loss).backward()
        optimizer.step()
        found = runtime.stats().placement
        numel = sum(p.numel() for p in model.parameters())
        total = sum(sum(tiers.values()) for name, tiers in found.items() if name != "param")
        exact = numel * (k + 2 * 4 / 256)
        assert exact <= total <= exact + 4 * 5 * 4096  # of each region's records


def test_states_are_saved_and_loaded_to_the_bit(tmp_path: Path) -> None:
    with sharded(tmp_path, "nvme", compute_dtype="bf16") as (_, first):
        optimizer = tiermem.optim.AdamW8bit(first.parameters(), lr=1e-2)
        for step in range(3):
            take_step(first, optimizer, step)
        weights = copy.deepcopy(first.state_dict())
        saved = copy.deepcopy(optimizer.state_dict())
        losses = [take_step(first, optimizer, step) for step in range(3, 6)]
    with sharded(tmp_path, "host", compute_dtype="bf16") as (_, second):
        second.load_state_dict(weights)
        again = tiermem.optim.AdamW8bit(second.parameters(), lr=1e-2)
        take_step(second, again, 9)  # something to forget
        second.load_state_dict(weights)
        again.load_state_dict(saved)
        assert [take_step(second, again, step) for step in range(3, 6)] == losses


def test_it_trains_as_with_fp32_moments(tmp_path: Path) -> None:
    """A net that learns a function: the loss falls alike, to within a tenth of what it falls by."""
    ends = {}
    for kind in ("AdamW", "AdamW8bit"):
        with sharded(tmp_path) as (_, model):
            make: Any = getattr(tiermem.optim, kind)
            optimizer = make(model.parameters(), lr=3e-3)
            for step in range(150):
                x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
                loss = (model(x) - x.roll(1, dims=1).abs()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    start = loss.item()
            ends[kind] = loss.item()
    fell = start - ends["AdamW"]
    assert fell > 0.5 * start
    assert abs(ends["AdamW8bit"] - ends["AdamW"]) < 0.1 * fell


def _train(rank: int, size: int, stage: int) -> list[Any]:
    torch.set_num_threads(1)
    model = make_net()
    config = {"stage": stage, "device": "cpu", "host_memory": "16MiB", "pin_memory": False}
    with tiermem.Runtime({**config, "persistence_threshold_numel": 300}) as runtime:
        tiermem.shard(model, runtime)
        optimizer = tiermem.optim.AdamW8bit(model.parameters(), lr=1e-2)
        for step in range(3):
            model(inputs(10 * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [tiermem.full_param(p).numpy() for p in model.parameters()] + [
            optimizer.state[p]["exp_avg"].numpy() for p in model.parameters()
        ]


def test_every_stage_on_two_ranks() -> None:
    results = [found for stage in (0, 1, 2, 3) for found in run_ranks(_train, 2, stage)]
    for result in results[1:]:
        assert all((a == b).all() for a, b in zip(result, results[0], strict=True))
