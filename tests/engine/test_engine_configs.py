"""DeepSpeed configurations as people have written them, trained: three steps on a small model, with
the bits of a plain loop that has the numbers which the file means.

The files, and a text with blocks of configuration, lie beside the repository (``shared``); this skips
where they are absent. Paths and batch sizes are scaled to this machine, nothing else.
``tests/config/test_deepspeed_files.py`` has what each file's keys become, and which are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import batch, make_net

import tiermem
from tiermem.config import parse_lenient, read_deepspeed
from tiermem.models.reference import round_ties_away

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = REPOSITORY.parent / "shared"
STEPS = 3
Rates = Callable[[int], float]


def constant(lr: float) -> Rates:
    return lambda step: lr


DEFAULT = constant(1e-3)


def warmup(low: float, high: float, steps: int) -> Rates:
    """WarmupLR's logarithmic rise by iterations; the first step comes before the first of them."""

    def rate(step: int) -> float:
        if step == 0:
            return low
        return low + (high - low) * min(1.0, math.log(step) / math.log(steps))

    return rate


@dataclass(frozen=True)
class Means:
    """What a file means for numbers, read by a person."""

    precision: str = "fp32"  # where a file leaves it to the model, the model is fp32
    rates: Rates = DEFAULT
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.0
    clip: float = 0.0
    micro_steps: int = 1
    loss_scale: float = 1.0
    own_optimizer: bool = False  # the file has none: the program gives torch.optim.AdamW(lr=1e-3)


FILES: dict[str, Means] = {
    "01.json": Means(own_optimizer=True),
    "03.json": Means("fp16", warmup(0, 3e-5, 500), (0.8, 0.999), 3e-7, loss_scale=2**16),
    "05.json": Means("bf16", warmup(0, 1e-3, 1000)),
    "06.json": Means(clip=1.0, own_optimizer=True),
    "10.json": Means("fp16", clip=1.0, loss_scale=2**16, own_optimizer=True),
    "12.json": Means(own_optimizer=True),
    "14.json": Means("bf16", constant(2e-5), (0.9, 0.95), 0.1),
    "16.json": Means("bf16", own_optimizer=True),
    "18.json": Means(rates=warmup(0, 1e-3, 1000)),
    "20.json": Means(own_optimizer=True),
    "22.json": Means(own_optimizer=True),
    "26.json": Means(rates=warmup(0, 1e-3, 1000)),
    "28.json": Means(own_optimizer=True),
    "30.json": Means("bf16", own_optimizer=True),
    "32.json": Means(own_optimizer=True),
    "40.json": Means(
        "fp16", warmup(0, 1e-5, 100), (0.9, 0.95), 0.1, 1.0, micro_steps=8, loss_scale=2**16
    ),
    "42.json": Means("fp16", constant(2e-4), (0.9, 0.95), 0.01, 1.0, micro_steps=8, loss_scale=2**16),
    "44.json": Means(rates=warmup(0, 1e-3, 1000)),
    "50.json": Means("fp16", warmup(1e-6, 1e-5, 100), (0.9, 0.95), 0.0, 1.0, loss_scale=2**12),
    "54.json": Means(),
}
BLOCKS: dict[int, Means | None] = {
    0: Means(own_optimizer=True),
    1: Means(own_optimizer=True),
    2: Means(own_optimizer=True),
    3: Means(own_optimizer=True),
    4: Means(own_optimizer=True),
    5: None,  # activation_checkpointing: refused until it is built
    6: Means("fp16", loss_scale=2**16, own_optimizer=True),
    7: Means(own_optimizer=True),
    8: Means(own_optimizer=True),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_of(model: Any, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Large enough for norms above 1, which the files clip at, and below what overflows."""
    loss: torch.Tensor = model(batch(number, dtype)).float().square().mean() * 12
    return loss


def scaled(config: dict[str, Any], base: Path) -> dict[str, Any]:
    """The same with its directories below ``base`` and a step of one rank's micro-steps."""
    zero = config.get("zero_optimization", {})
    for block in ("offload_param", "offload_optimizer"):
        if "nvme_path" in zero.get(block, {}):
            zero[block]["nvme_path"] = str(base)
    micro, steps = (
        config.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if isinstance(config.get("train_batch_size"), int) and isinstance(micro, int):
        config["train_batch_size"] = micro * (steps if isinstance(steps, int) else 1)
    return config


def train(config: dict[str, Any], means: Means) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and masters of a program written for DeepSpeed."""
    model = make_net()
    given = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    engine, *_ = tiermem.initialize(
        model=model, config=config, optimizer=given if means.own_optimizer else None
    )
    losses = []
    with engine:
        assert engine.gradient_accumulation_steps() == means.micro_steps
        for number in range(STEPS * means.micro_steps):
            loss = loss_of(engine, number, DTYPES[means.precision])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        assert engine.global_steps == STEPS
        assert engine.skipped_steps == 0
        return losses, [tiermem.full_master(p) for p in engine.module.parameters()]


def reference(means: Means) -> tuple[list[float], list[torch.Tensor]]:
    """The same in plain PyTorch: fp32 masters, copies that compute, torch's fused AdamW."""
    dtype = DTYPES[means.precision]
    masters = [p.detach().clone().requires_grad_() for p in make_net().parameters()]
    model = make_net().to(dtype)
    optimizer = torch.optim.AdamW(
        masters, lr=1e-3, betas=means.betas, weight_decay=means.decay, fused=True
    )
    losses = []
    for step in range(STEPS):
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(round_ties_away(master.detach()) if dtype == torch.bfloat16 else master)
        sums: list[torch.Tensor] = []
        for micro in range(means.micro_steps):
            loss = loss_of(model, step * means.micro_steps + micro, dtype)
            losses.append(float(loss.detach()))
            if means.micro_steps > 1:
                loss = loss / means.micro_steps
            grads = torch.autograd.grad(loss * means.loss_scale, list(model.parameters()))
            sums = (
                [s + g.float() for s, g in zip(sums, grads, strict=True)]
                if sums
                else [g.float() for g in grads]
            )
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in sums)) / means.loss_scale
        clip = min(1.0, means.clip / (norm + 1e-6)) if means.clip else 1.0
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad * torch.tensor(clip / means.loss_scale, dtype=torch.float32)
        optimizer.param_groups[0]["lr"] = means.rates(step)
        optimizer.step()
    return losses, [master.detach() for master in masters]


def check(config: dict[str, Any], means: Means) -> None:
    for key, value in read_deepspeed(config).effective.items():
        print(key, value)
    losses, masters = train(config, means)
    expected_losses, expected = reference(means)
    assert losses == expected_losses
    for ours, theirs in zip(masters, expected, strict=True):
        assert torch.equal(ours, theirs)


def accepted() -> list[str]:
    rows = json.loads((REPOSITORY / "tests/config/deepspeed_expected.json").read_text("utf-8"))
    return [name for name, row in rows.items() if "refused" not in row]


def test_every_accepted_file_is_trained() -> None:
    assert accepted() == list(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_trains_as_it_says(name: str, tmp_path: Path) -> None:
    path = SHARED / "configs" / name
    if not path.is_file():
        pytest.skip("no shared/configs beside the repository")
    check(scaled(parse_lenient(path.read_text("utf-8")), tmp_path), FILES[name])


@pytest.mark.parametrize("at", BLOCKS)
def test_a_block_of_the_text_trains_as_it_says(at: int, tmp_path: Path) -> None:
    path = SHARED / "reference" / "zero-stages.txt"
    if not path.is_file():
        pytest.skip("no shared/reference beside the repository")
    pattern = re.compile(r"^(?://[^\n]*\n)*\{\n.*?^\}$", re.MULTILINE | re.DOTALL)
    blocks = pattern.findall(path.read_text("utf-8"))
    assert len(blocks) == len(BLOCKS)
    config, means = parse_lenient(blocks[at]), BLOCKS[at]
    if means is None:
        with pytest.raises(tiermem.errors.ConfigError, match="activation_checkpointing: refused"):
            tiermem.initialize(model=make_net(), config=config)
    else:
        check(scaled(config, tmp_path), means)


OWN: dict[str, tuple[str, Means]] = {
    "comments and strings": (
        """{ // a comment
        "zero_optimization": {"stage": "3", "sub_group_size": "1e14", "reduce_bucket_size": "1",
            "offload_optimizer": {"device": "cpu"},},  # another
        "optimizer": {"type": "AdamW", "params": {"lr": "2e-3", "betas": [0.8, 0.9]}},
        }""",
        Means(rates=constant(2e-3), betas=(0.8, 0.9)),
    ),
    "old names": (
        """{"zero_optimization": {"stage": 2, "cpu_offload": true}, "bfloat16": {"enabled": true},
        "optimizer": {"type": "adam", "params": {"lr": 1e-3}}, "gradient_accumulation_steps": 2}""",
        Means("bf16", micro_steps=2),
    ),
    "a static scale": (
        """{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.01,
        "fp16": {"enabled": true, "loss_scale": 512, "min_loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}}""",
        Means("fp16", decay=0.1, clip=0.01, loss_scale=512),
    ),
    "all auto": (
        """{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto",
            "warmup_max_lr": "auto", "warmup_num_steps": 4}}}""",
        Means(rates=warmup(0, 1e-3, 4)),
    ),
    "both tiers on drives": (
        """{"_comment": "local NVMe only", "zero_optimization": {"stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5,
                "buffer_size": 1e8, "max_in_cpu": 1},
            "offload_optimizer": {"device": "nvme", "nvme_path": ["/local_nvme"], "fast_init": true}},
        "aio": {"block_size": 262144, "queue_depth": 4, "thread_count": 2, "overlap_events": true},
        "wandb": {"enabled": true}, "steps_per_print": 1e5}""",
        Means(own_optimizer=True),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_small_ones_of_our_own(name: str, tmp_path: Path) -> None:
    text, means = OWN[name]
    config = parse_lenient(text)
    for block in config["zero_optimization"].values():
        if isinstance(block, dict) and "nvme_path" in block:
            block["nvme_path"] = [str(tmp_path)]
    check(scaled(config, tmp_path), means)
