"""16-bit parameters with whole fp32 masters: fp16, and bf16 with ``master: 'fp32'``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics_rig import PLACEMENTS, batch, make_net, placed
from torch import nn

import tiermem
from tiermem.errors import BudgetError
from tiermem.kernels import AdamWStep
from tiermem.kernels.torch_kernels import TorchKernels

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16": {"compute_dtype": "fp16"},
    "bf16": {"compute_dtype": "bf16", "master": "fp32"},
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Reference:
    """fp32 masters in plain PyTorch and a rounded copy that computes; AdamW as the kernels' own."""

    def __init__(self, dtype: torch.dtype, scale: float) -> None:
        self.net = make_net()
        self.masters = [p.detach().clone().view(-1) for p in self.net.parameters()]
        self.moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self.masters]
        self.net.to(dtype)
        self.scale = scale
        self.steps = 0

    def step(self, x: torch.Tensor) -> float:
        loss = self.net(x).float().square().mean()
        (loss * self.scale).backward()
        self.steps += 1
        hyper = AdamWStep(1e-2, 0.9, 0.999, 1e-8, 1e-2, self.steps, 1 / self.scale)
        with TorchKernels() as kernels, torch.no_grad():
            for p, master, moments in zip(
                self.net.parameters(), self.masters, self.moments, strict=True
            ):
                assert p.grad is not None
                kernels.adamw_master(hyper, p.view(-1), master, *moments, p.grad.view(-1))
                p.grad = None
        return loss.item()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("meta", [False, True])
def test_trains_as_plain_pytorch_does(
    precision: str, placement: str, meta: bool, tmp_path: Path
) -> None:
    dtype = DTYPES[precision]
    scale = 1024.0 if precision == "fp16" else 1.0
    reference = Reference(dtype, scale)
    values = {name: p.detach().clone() for name, p in make_net().named_parameters()}

    def fill(module: nn.Module, name: str) -> None:
        for key, param in module.named_parameters(recurse=False):
            param.copy_(values[f"{name}.{key}" if name else key])

    fp16 = {"fp16": {"loss_scale": scale}} if precision == "fp16" else {}
    config = {**placed(placement, tmp_path), **PRECISIONS[precision], **fp16}
    with tiermem.Runtime(config) as runtime:
        net = make_net()
        model = tiermem.shard(net.to("meta") if meta else net, runtime, init=fill)
        for p, master in zip(model.parameters(), reference.masters, strict=True):
            assert torch.equal(tiermem.full_master(p).view(-1), master)  # exact from the start
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            x = batch(step, dtype)
            loss = model(x).float().square().mean()
            (optimizer.scale(loss) if fp16 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == reference.step(x)
        for p, theirs, master in zip(
            model.parameters(), reference.net.parameters(), reference.masters, strict=True
        ):
            assert torch.equal(tiermem.full_param(p), theirs.detach())
            assert torch.equal(optimizer.state[p]["master"].view(-1), master)
        where = runtime.stats().placement
        assert set(where) == {"param", "master", "exp_avg", "exp_avg_sq"}
        assert where["master"] == where["exp_avg"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_the_user_writes_becomes_the_master(
    precision: str, placement: str, tmp_path: Path
) -> None:
    config = {**placed(placement, tmp_path), **PRECISIONS[precision]}
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(make_net(), runtime)
        masters = {n: tiermem.full_master(p) for n, p in model.named_parameters()}
        weight = model[0].weight
        with torch.no_grad():
            weight.mul_(3)  # a fault that writes
        assert torch.equal(tiermem.full_master(weight), tiermem.full_param(weight).float())
        for name, p in model.named_parameters():
            if p is not weight:
                assert torch.equal(tiermem.full_master(p), masters[name]), name
        with tiermem.gathered(weight, modify=True):
            weight.data.fill_(0.1)
        written = tiermem.full_param(weight)
        assert torch.equal(tiermem.full_master(weight), written.float())
        # 0.1 is not a number of 16 bits: a master of it stays one.
        tiermem.set_full_master(weight, torch.full(weight.shape, 0.1))
        assert torch.equal(tiermem.full_param(weight), written)
        assert torch.equal(tiermem.full_master(weight), torch.full(weight.shape, 0.1))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parameter_that_was_frozen_is_its_own_master(
    precision: str, placement: str, tmp_path: Path
) -> None:
    config = {**placed(placement, tmp_path), **PRECISIONS[precision]}
    with tiermem.Runtime(config) as runtime:
        net = make_net()
        net[2].requires_grad_(False)
        model = tiermem.shard(net, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for p in model[2].parameters():
            p.requires_grad_(True)
            assert torch.equal(tiermem.full_master(p), tiermem.full_param(p).float())
        before = tiermem.full_master(model[2].weight)
        optimizer.scale(model(batch(0, DTYPES[precision])).float().square().mean()).backward()
        optimizer.step()
        moved = (tiermem.full_master(model[2].weight) - before).abs()
        assert 0 < float(moved.max()) < 2e-2  # one step of Adam from where it was, not from 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_state_goes_on_in_another_placement(precision: str, tmp_path: Path) -> None:
    fp16 = {"fp16": {"loss_scale": 1024.0}}

    def steps(model: nn.Module, optimizer: Any, count: range) -> list[float]:
        losses = []
        for step in count:
            loss = model(batch(step, DTYPES[precision])).float().square().mean()
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    saved: list[Any] = []
    losses = []
    for placement in PLACEMENTS:
        config = {**placed(placement, tmp_path), **PRECISIONS[precision], **fp16}
        with tiermem.Runtime(config) as runtime:
            model = tiermem.shard(make_net(), runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            if not saved:
                steps(model, optimizer, range(3))
                saved = [dict(model.state_dict()), optimizer.state_dict()]
                torch.save(saved, tmp_path / "saved.pt")
            else:
                params, states = torch.load(tmp_path / "saved.pt")
                model.load_state_dict(params)
                optimizer.load_state_dict(states)
            losses.append(steps(model, optimizer, range(3, 6)))
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(("precision", "read", "written"), [("fp16", 16, 14), ("bf16", 16, 14)])
def test_bytes_on_the_drive(precision: str, read: int, written: int, tmp_path: Path) -> None:
    """Parameters in forward and backward 2 + 2, master 4, moments 8; the parameter once: 2."""
    config = {
        **placed("nvme", tmp_path),
        **PRECISIONS[precision],
        "host_memory": "24MiB",
        "device_memory": "9MiB",  # one layer at a time, and the small parameters
        "persistence_threshold_numel": 5000,
        "prefetch_bytes": 0,
        "gradient_accumulation_steps": 1,
    }
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)])
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(net, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(2, 2048).to(DTYPES[precision])
        figures = []
        for _ in range(3):
            optimizer.scale(model(x).float().square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            runtime.drain()
            stats = runtime.stats()
            figures.append((stats.read_bytes, stats.written_bytes))
        numel = sum(p.numel() for p in model.parameters())
        spilled = 2 if any(group.gradient_record for group in runtime.groups) else 0
        (r0, w0), (r1, w1) = figures[1:]
        assert (r1 - r0) / numel <= read + spilled + 2  # the last layer may stay between passes
        assert (r1 - r0) / numel >= read + spilled - 2
        assert (w1 - w0) / numel == pytest.approx(written + spilled, abs=0.1)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("declared", [None, 1])
def test_the_smallest_budget_that_is_named_works(
    precision: str, placement: str, declared: int | None, tmp_path: Path
) -> None:
    """Masters of one layer are held whole while it is filled: more than its gradients take."""

    def run(host_memory: int) -> None:
        config = {
            **placed(placement, tmp_path),
            **PRECISIONS[precision],
            "host_memory": host_memory,
            "gradient_accumulation_steps": declared,
            "sub_group_numel": 4096,
        }
        with tiermem.Runtime(config) as runtime:
            model = tiermem.shard(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), runtime)
            optimizer = tiermem.optim.AdamW(model.parameters())
            x = torch.randn(2, 512).to(DTYPES[precision])
            for _ in range(2):
                optimizer.scale(model(x).float().square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(BudgetError) as error:
        run(4096 * 4)
    found = re.search(r"\((\d+) bytes\)\. Remedy", str(error.value))
    assert found is not None
    run(int(found[1]))
