"""The same training wholly in memory with plain PyTorch: what tiermem has to agree with.

bf16 follows the split-master scheme: fp32 masters, a bf16 copy that computes, rounded to nearest
with ties away from zero (the rounding that a 16-bit remainder can invert; to even, if masters are kept
whole), and AdamW on the masters with the bf16 gradients converted to fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tiermem.models.gpt import GPT, GPTConfig, init_model

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How to train; the same for tiermem and for the reference."""

    precision: Literal["bf16", "fp32"] = "bf16"
    ties_away: bool = True  # how bf16 copies are rounded, as with a split master; else to even
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = None
    schedule: Callable[[int], float] | None = None  # step from 0 -> factor of the learning rate
    seed: int = 0


def round_ties_away(master: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, to nearest, ties away from zero."""
    bits = master.view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


class ReferenceTrainer:
    """A `GPT`, its fp32 masters and `torch.optim.AdamW(fused=True)`, all in memory."""

    def __init__(self, config: GPTConfig, options: TrainOptions, device: str = "cpu") -> None:
        self.options = options
        self.device = torch.device(device)
        model = GPT(config)
        init_model(model, options.seed)
        self.model: nn.Module = model.to(self.device)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.masters: list[torch.Tensor] = list(parameters)
        if options.precision == "bf16":
            self.masters = [p.detach().clone() for p in parameters]
            self.model.to(torch.bfloat16)
            parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._parameters = parameters
        self._copy_back()
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.scheduler = (
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, options.schedule)
            if options.schedule is not None
            else None
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one batch, with its graph."""
        tokens, targets = batch
        loss: torch.Tensor = self.model(tokens.to(self.device), targets.to(self.device))
        return loss

    def update(self) -> None:
        """Clip, AdamW on the masters, copy back, and drop the gradients."""
        if self.options.precision == "bf16":
            for master, parameter in zip(self.masters, self._parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        if self.options.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        self._copy_back()

    def step(self, batch: Batch) -> float:
        """One training step; its loss."""
        loss = self.forward(batch)
        torch.autograd.backward(loss)
        self.update()
        return float(loss.detach())

    @torch.no_grad()
    def _copy_back(self) -> None:
        if self.options.precision == "bf16":
            for master, parameter in zip(self.masters, self._parameters, strict=True):
                parameter.copy_(round_ties_away(master) if self.options.ties_away else master)


def train_reference(
    config: GPTConfig,
    steps: int,
    batches: Iterable[Batch],
    options: TrainOptions | None = None,
    *,
    device: str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train for ``steps`` steps on the first batches; the losses as fp32 values, one per step."""
    trainer = ReferenceTrainer(config, options or TrainOptions(), device)
    losses: list[float] = []
    for step, batch in zip(range(steps), batches, strict=False):
        losses.append(trainer.step(batch))
        if on_step is not None:
            on_step(step, losses[-1])
    return losses


def warmup_cosine(steps: int, warmup: int, floor: float = 0.1) -> Callable[[int], float]:
    """A linear warm-up over ``warmup`` steps, then half a cosine down to ``floor`` at ``steps``."""
    return _WarmupCosine(steps, warmup, floor)


@dataclass(frozen=True, slots=True)
class _WarmupCosine:
    steps: int
    warmup: int
    floor: float

    def __call__(self, step: int) -> float:

        if step < self.warmup:
            return (step + 1) / self.warmup
        share = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share))
