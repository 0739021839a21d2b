"""The path through host images that accelerators take, on memory that the host cannot address as far
as the runtime knows: the same bits as without it."""

from __future__ import annotations

import pytest
import torch
from zero_models import Plain
from zero_twins import batch, settings

import tiermem
from tiermem.memory.lease import AcceleratorPool
from tiermem.zero.runtime import Runtime


def open_as_if_on_an_accelerator(self: Runtime, plan) -> None:
    self.device_plan = plan
    self.gather.room.pool = AcceleratorPool(torch.device("cpu"), self.ledger, plan.budget)


@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_host_images_give_the_same_bits(tmp_path, monkeypatch, mode: str) -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = Plain()
        result = []
        with tiermem.Runtime(settings(tmp_path, update=mode, prefetch_bytes="1MiB")) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(5):
                loss = model(batch(step)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                result.append(loss.item())
            with torch.no_grad():  # a write of the user's goes back to the store
                model.blocks[0].up.weight.mul_(0.5)
            result.append(model(batch(9)).square().mean().item())
        return result

    direct = losses()
    monkeypatch.setattr(Runtime, "open_device", open_as_if_on_an_accelerator)
    monkeypatch.setattr(Runtime, "transfer_groups", 3)
    assert losses() == direct


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_trains_on_an_accelerator(tmp_path) -> None:
    torch.manual_seed(0)
    model = Plain()
    with tiermem.Runtime(settings(tmp_path, device="auto")) as runtime:
        tiermem.shard(model, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = batch(0).to(runtime.device)
        first = None
        for _ in range(10):
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first = loss.item() if first is None else first
        assert loss.item() < first
