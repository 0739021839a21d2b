"""What is saved on two ranks and loaded on another number of ranks, at another stage, has the same
bits, and trains on to the same bits; looking at single values on several ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_rig import batch, build
from ranks import run_ranks
from torch import nn

import tiermem

Arrays = dict[str, np.ndarray]

CONFIG = {"device": "cpu", "host_memory": "64MiB", "persistence_threshold_numel": 1000}


class Counting(nn.Module):
    """`build` with buffers; one of them is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build()
        self.register_buffer("shift", torch.zeros(3, 2).t())
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool), persistent=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.shift.sum()


def make(rank: int) -> Counting:
    """Other values on each rank."""
    model = Counting()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.shift, model.count):
            tensor.add_(rank)
        model.mask[rank % 5] = True
    return model


def step(model: nn.Module, optimizer: tiermem.optim.AdamW, x: torch.Tensor) -> float:
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def everything(model: nn.Module, optimizer: tiermem.optim.AdamW) -> Arrays:
    found = {}
    for name, param in model.named_parameters():
        found[name] = tiermem.full_param(param).float().numpy()
        found[f"{name} master"] = tiermem.full_master(param).numpy()
        for key, value in optimizer.state[param].items():
            found[f"{name} {key}"] = value.numpy()
    found |= {f"{name} saved": v.float().numpy() for name, v in model.state_dict().items()}
    return found


def save(rank: int, size: int, config: dict[str, Any], file: str) -> tuple[Arrays, Arrays]:
    """What the first rank started from as this rank has it, and what was saved."""
    model, first = make(rank), make(0)
    with tiermem.Runtime({**CONFIG, **config}) as runtime:
        tiermem.shard(model, runtime)
        different = {
            name: np.array([rank])
            for name, param in first.named_parameters()
            if not torch.equal(tiermem.full_param(dict(model.named_parameters())[name]), param)
        }
        for (name, mine), theirs in zip(model.named_buffers(), first.buffers(), strict=True):
            if not torch.equal(mine, theirs):
                different[name] = np.array([rank])
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            step(model, optimizer, batch(rank, number, torch.bfloat16))
        whole = {"model": model.state_dict(), "opt": copy.deepcopy(optimizer.state_dict())}
        if rank == 0:
            torch.save(whole, file)
        return different, everything(model, optimizer)


def load(
    rank: int, size: int, configs: list[dict[str, Any]], file: str
) -> list[tuple[Arrays, list[float], Arrays]]:
    """By configuration: what was loaded, losses of more steps (on the same data on each rank, so that
    their number does not matter), and what came out."""
    results = []
    for config in configs:
        model = make(rank + 5)
        with tiermem.Runtime({**CONFIG, **config}) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-1)
            saved = torch.load(file, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["opt"])
            loaded = everything(model, optimizer)
            losses = [step(model, optimizer, batch(9, n, torch.bfloat16)) for n in range(2)]
            results.append((loaded, losses, everything(model, optimizer)))
    return results


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.timeout(300)
def test_saved_on_two_ranks_loaded_on_others(tmp_path: Path) -> None:
    nvme = {"params": "nvme", "optimizer": "nvme", "paths": [str(tmp_path)], "resident_memory": 0}
    file = str(tmp_path / "saved.pt")
    saved = run_ranks(save, 2, nvme, file, timeout_s=100)
    assert saved[0][0] == saved[1][0] == {}
    assert_equal(saved[1][1], saved[0][1])
    configs = {
        1: [{}, nvme],
        3: [{"stage": 0}, nvme],
        4: [{"stage": 2, "optimizer": "nvme", "paths": [str(tmp_path)]}, {"stage": 1}, {}],
    }
    after: list[tuple[list[float], Arrays]] = []
    for size, mine in configs.items():
        for results in run_ranks(load, size, mine, file, timeout_s=100):
            for loaded, losses, end in results:
                assert_equal(loaded, saved[0][1])
                after.append((losses, end))
    for losses, end in after:
        assert losses == after[0][0]
        assert_equal(end, after[0][1])


def look(rank: int, size: int, configs: list[dict[str, Any]]) -> list[Arrays]:
    """Gradients and writes; all ranks do the same."""
    results = []
    for config in configs:
        model = make(rank)
        with tiermem.Runtime({**CONFIG, **config}) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            step(model, optimizer, batch(rank, 0, torch.bfloat16))
            model(batch(rank, 1, torch.bfloat16)).float().square().mean().backward()
            found = {}
            for name, param in model.named_parameters():
                gradient = tiermem.full_grad(param)
                assert gradient is not None
                found[f"{name} gradient"] = gradient.float().numpy()
            optimizer.zero_grad()
            weight, bias = model.body[0].weight, model.body[1][0][0].bias
            with tiermem.gathered([weight, bias], modify=True):
                weight.data[3] = 7
                bias.data.zero_()
            with torch.no_grad():
                model.body[3].weight.mul_(0.5)
            step(model, optimizer, batch(rank, 2, torch.bfloat16))
            results.append(found | everything(model, optimizer))
    return results


def test_looking_and_writing(tmp_path: Path) -> None:
    nvme = {"params": "nvme", "optimizer": "nvme", "paths": [str(tmp_path)], "resident_memory": 0}
    configs = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {}, nvme]
    first, second = run_ranks(look, 2, configs, timeout_s=100)
    for found in (*first, *second):
        assert_equal(found, first[0])
