"""Training a small GPT through tiermem and through plain PyTorch, and comparing all bits of it."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.io import probe_backends
from tiermem.models.gpt import GPT, GPTConfig, init_model
from tiermem.zero.stats import RuntimeStats

MODEL = GPTConfig(num_layers=2, hidden_size=64, num_heads=2, context=32)
"""134,912 parameters in 28 tensors, every size a multiple of 64; two repeated blocks."""

PERSISTENT_BELOW = 300
"""Elements: with it the biases and norms of `MODEL` persist and all matrices are sharded."""

STEPS = 6
BATCH = (2, 32)

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """What is trained: everything that may change a result."""

    dtype: str = "bf16"
    steps: int = STEPS
    micro_steps: int = 1
    clip: float | None = None
    schedule: bool = False
    model: GPTConfig = MODEL
    options: Mapping[str, Any] = field(
        default_factory=lambda: {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    )


@dataclass(frozen=True)
class Trained:
    """``losses`` are exact; ``digest`` covers losses, parameters, masters and moments."""

    losses: tuple[float, ...]
    digest: str
    stats: RuntimeStats | None = None


def batches(count: int, seed: int = 1, shape: tuple[int, int] = BATCH) -> list[Batch]:
    """``count`` random batches, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        tokens = torch.randint(0, 256, (shape[0], shape[1] + 1), generator=generator)
        result.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return result


def make_model(config: GPTConfig = MODEL, seed: int = 0) -> GPT:
    model = GPT(config)
    init_model(model, seed)
    return model


@functools.cache
def best_backend() -> str:
    """What 'auto' would choose; asking for it by name saves each runtime the probe."""
    return next(name for name, result in probe_backends().items() if result == "works")


def tier_config(**changes: Any) -> dict[str, Any]:
    """A configuration for `MODEL`; None values mean 'not given'."""
    config: dict[str, Any] = {
        "host_memory": 64 << 20,
        "persistence_threshold_numel": PERSISTENT_BELOW,
        "compute_dtype": "bf16",
        "device": "cpu",
        "pin_memory": False,
        "io": {"backend": best_backend()},
    } | changes
    return {key: value for key, value in config.items() if value is not None}


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two: matrices with weight decay, vectors without."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.2},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def run_steps(
    model: nn.Module,
    optimizer: Any,
    recipe: Recipe,
    *,
    scheduler: Any = None,
    first: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Steps ``first`` to ``recipe.steps`` of the recipe's loop, on plain or sharded models."""
    data = batches(recipe.steps * recipe.micro_steps)
    losses = []
    for step in range(first, recipe.steps):
        mine = data[step * recipe.micro_steps : (step + 1) * recipe.micro_steps]
        for tokens, targets in mine:
            loss = model(tokens, targets)
            (loss / recipe.micro_steps if recipe.micro_steps > 1 else loss).backward()
            losses.append(float(loss.detach()))
        if recipe.clip is not None:
            if hasattr(optimizer, "clip_grad_norm_"):
                optimizer.clip_grad_norm_(recipe.clip)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if on_step is not None:
            on_step(step)
    return losses


@contextmanager
def sharded(
    config: Mapping[str, Any],
    recipe: Recipe,
    groups: Callable[[nn.Module], Any] | None = None,
) -> Iterator[tuple[tiermem.Runtime, nn.Module, tiermem.optim.AdamW]]:
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(make_model(recipe.model), runtime)
        params = groups(model) if groups else model.parameters()
        yield runtime, model, tiermem.optim.AdamW(params, **recipe.options)


def train(config: Mapping[str, Any], recipe: Recipe | None = None) -> Trained:
    """Trains through tiermem; ``config`` as for `tiermem.Runtime`."""
    recipe = recipe or Recipe()
    with sharded({**config, "compute_dtype": recipe.dtype}, recipe) as (runtime, model, optimizer):
        scheduler = halving(optimizer) if recipe.schedule else None
        losses = run_steps(model, optimizer, recipe, scheduler=scheduler)
        value = digest(losses, model, optimizer)
        return Trained(tuple(losses), value, runtime.stats())


def contents(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, master and moment of a sharded model by name."""
    for name, param in model.named_parameters():
        yield name, tiermem.full_param(param)
        yield f"{name}.master", tiermem.full_master(param)
        for key in ("exp_avg", "exp_avg_sq"):
            if param in optimizer.state:
                yield f"{name}.{key}", optimizer.state[param][key]


def digest(losses: Sequence[float], model: nn.Module, optimizer: Any) -> str:
    result = hashlib.blake2b(struct.pack(f"<{len(losses)}d", *losses), digest_size=16)
    for name, value in contents(model, optimizer):
        result.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        result.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def plain(
    recipe: Recipe, groups: Callable[[nn.Module], Any] | None = None
) -> tuple[list[float], nn.Module, torch.optim.AdamW]:
    """The same in fp32 with plain PyTorch."""
    model = make_model(recipe.model)
    params = groups(model) if groups else model.parameters()
    optimizer = torch.optim.AdamW(params, fused=True, **recipe.options)
    scheduler = halving(optimizer) if recipe.schedule else None
    return run_steps(model, optimizer, recipe, scheduler=scheduler), model, optimizer


def same_as_plain(
    recipe: Recipe,
    config: Mapping[str, Any],
    groups: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Asserts bit equality in fp32 of losses, parameters and moments with plain PyTorch."""
    losses, reference, their = plain(recipe, groups)
    with sharded({**config, "compute_dtype": "fp32"}, recipe, groups) as (_, model, optimizer):
        scheduler = halving(optimizer) if recipe.schedule else None
        assert run_steps(model, optimizer, recipe, scheduler=scheduler) == losses
        assert_same_values(model, optimizer, reference, their)


def assert_same_values(model: nn.Module, optimizer: Any, reference: nn.Module, their: Any) -> None:
    theirs = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert_bits(name, tiermem.full_param(param), theirs[name].detach())
        for key in ("exp_avg", "exp_avg_sq"):
            assert_bits(f"{name}.{key}", optimizer.state[param][key], their.state[theirs[name]][key])
        assert int(optimizer.state[param]["step"]) == int(their.state[theirs[name]]["step"])


def assert_bits(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    if not torch.equal(ours, theirs):
        wrong = int((ours != theirs).sum())
        worst = float((ours.double() - theirs.double()).abs().max())
        raise AssertionError(
            f"{name}: {wrong} of {ours.numel()} elements differ, at most by {worst:.3g}"
        )


def make_paths(base: Path, count: int) -> list[str]:
    paths = [base / f"drive{index}" for index in range(count)]
    for path in paths:
        path.mkdir(exist_ok=True)
    return [str(path) for path in paths]


def run_directories(paths: Iterable[str | Path]) -> list[Path]:
    """The run directories that exist below ``paths``."""
    return [entry for path in paths for entry in Path(path).iterdir()]
