"""In which precision micro-steps are added up: what it does to bits, memory and the drive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numerics_rig import PLACEMENTS, batch, make_net, placed
from torch import nn

import tiermem

MICRO = 3
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def loss_of(model: nn.Module, micro: int, dtype: torch.dtype) -> torch.Tensor:
    result: torch.Tensor = model(batch(micro, dtype)).float().square().mean()
    return result


@pytest.mark.parametrize("accumulation", ["fp32", "param"])
@pytest.mark.parametrize("declared", [None, MICRO])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_are_those_of_torch(
    precision: str, placement: str, declared: int | None, accumulation: str, tmp_path: Path
) -> None:
    """In the parameters' precision torch's own; in fp32 those of its gradients in fp32."""
    dtype = PRECISIONS[precision]
    plain = make_net().to(dtype)
    wide = [torch.zeros(p.shape) for p in plain.parameters()]
    for micro in range(MICRO):
        before = [None if p.grad is None else p.grad.clone() for p in plain.parameters()]
        plain.zero_grad()
        loss_of(plain, micro, dtype).backward()
        for p, old, total in zip(plain.parameters(), before, wide, strict=True):
            assert p.grad is not None
            total += p.grad.float()
            if old is not None:
                p.grad = old + p.grad
    config = {
        **placed(placement, tmp_path),
        "gradient_accumulation_dtype": accumulation,
        "gradient_accumulation_steps": declared,
    }
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(make_net().to(dtype), runtime)
        tiermem.optim.AdamW(model.parameters())
        for micro in range(MICRO):
            loss_of(model, micro, dtype).backward()
        for p, theirs, total in zip(model.parameters(), plain.parameters(), wide, strict=True):
            mine = tiermem.full_grad(p)
            assert mine is not None
            assert mine.dtype == (dtype if accumulation == "param" else torch.float32)
            assert torch.equal(mine, theirs.grad if accumulation == "param" else total)


def spilled_bytes(tmp_path: Path, steps: int, **changes: Any) -> tuple[float, float, int]:
    """Bytes read and written per element in one step of so many micro-steps, all gradients spilled; and
    those of host memory for gradients."""
    config: dict[str, Any] = {
        **placed("nvme", tmp_path),
        "persistence_threshold_numel": 5000,
        "device_memory": "32MiB",  # parameters stay there
        "params": "device",
        "prefetch_bytes": 0,
        "gradient_accumulation_steps": steps,
        **changes,
    }
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(6)]).bfloat16()
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(net, runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(2, 1024).bfloat16()
        for step in range(2):
            before = runtime.stats()
            for _ in range(steps):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            runtime.drain()
            stats = runtime.stats()
            if step:
                numel = sum(p.numel() for p in model.parameters())
                read = (stats.read_bytes - before.read_bytes) / numel
                written = (stats.written_bytes - before.written_bytes) / numel
    return read, written, stats.host.by_purpose["gradient"]


@pytest.mark.parametrize(("accumulation", "itemsize"), [("fp32", 4), ("param", 2)])
def test_bytes_on_the_drive(accumulation: str, itemsize: int, tmp_path: Path) -> None:
    """States 10 + 10; a gradient is written in each micro-step, and read to be added to or used."""
    read, written, _ = spilled_bytes(tmp_path, MICRO, gradient_accumulation_dtype=accumulation)
    # The update finds up to three of the six gradients in the buffers that they were spilled from.
    assert 10 + MICRO * itemsize - itemsize / 2 - 0.1 <= read <= 10 + MICRO * itemsize + 0.1
    assert written == pytest.approx(10 + MICRO * itemsize, rel=0.02)


def test_memory_of_kept_gradients(tmp_path: Path) -> None:
    for placement in ({"optimizer": "host"}, {"optimizer": "device"}):
        kept = {
            accumulation: spilled_bytes(
                tmp_path,
                2,
                gradient_accumulation_dtype=accumulation,
                host_memory="128MiB",
                device_memory="128MiB",
                **placement,
            )[2]
            for accumulation in ("fp32", "param")
        }
        assert kept["fp32"] == 2 * kept["param"]
