"""Low-rank adapters on a frozen base: training is that of plain torch, and the base costs what reading
it costs: no states, no gradients, and not a byte written after it was sharded."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_models import Plain, Structure
from zero_ranks import CaseRunner, Cases, RankTwins, at_sizes, changes_of, make_twins, world_size
from zero_written import Written, groups_of, ranges_of

from tiermem.types import ALIGNMENT

RANK = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STATE_BYTES = {"fp32": 4 + 4, "bf16": 4 + 4 + 2}
"""Per trained element: two moments; of a bf16 one the remainder of its fp32 master too."""


class Adapted(nn.Module):
    """``base(x) + B(A(dropout(x))) * scale`` (Hu et al. 2021, section 4.1)."""

    def __init__(self, base: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.1)
        self.lora_a = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype)
        nn.init.normal_(self.lora_b.weight, std=0.02)
        self.scale = 2.0
        self.enabled = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.base(x)
        if not self.enabled:
            return whole
        low = self.lora_b(self.lora_a(self.dropout(x.to(self.lora_a.weight.dtype))))
        return whole + (low * self.scale).to(whole.dtype)


class Quantized(nn.Module):
    """A frozen `nn.Linear` in 8 bits and one scale per row."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        rows = base.weight.detach().float()
        scale = rows.abs().amax(1, keepdim=True) / 127
        whole = (rows / scale).round().to(dtype)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight.to(torch.float32) * self.scale).to(x.dtype))


class Lora(Plain):
    """Half of the blocks have adapters; all else is frozen, in bf16."""

    def __init__(
        self,
        adapters: torch.dtype,
        checkpointed: bool = False,
        quantized: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.to(torch.bfloat16).requires_grad_(False)
        if quantized is not None:
            for block in self.blocks:
                block.up = Quantized(block.up, quantized)
                block.down = Quantized(block.down, quantized)
        for block in (self.blocks[0], self.blocks[2]):
            block.up = Adapted(block.up, adapters)
            block.down = Adapted(block.down, adapters)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return super().encode(tokens)
        x = self.embedding(tokens).requires_grad_()  # as PEFT has inputs require gradients
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def loss_in_fp32(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).float().square().mean()


def train(path: str, stage: int, placement: str, dtype: str, model: Any = Lora, **changes: Any) -> None:
    build: Any = functools.partial(model, DTYPES[dtype])
    options = {"optimizer": placement, **changes_of(stage), **changes}
    if stage == 3:
        options["params"] = placement
    twins = make_twins(build, path, Structure(build, loss_in_fp32), **options)
    with twins.runtime as runtime:
        runtime.drain()
        written = Written(runtime)
        twins.steps(3)
        if runtime.stats().update_mode == "deferred":
            check_gradients(twins)
        runtime.drain()
        twins.check()
        check_base_is_only_read(twins, written, stage)
        check_states(twins, dtype)


def check_gradients(twins: RankTwins) -> None:
    """Those of adapters only, in memory and in records."""
    model = twins.model
    twins.loss(model, twins.batch(9)).backward()
    for name, param in model.named_parameters():
        assert (param.grad is not None) == ("lora" in name), name
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    reserved = sum(group.trainable_numel for group in groups_of(model))
    pieces = sum(region.trainable for group in groups_of(model) for region in group.regions)
    assert trained / world_size() <= reserved <= trained / world_size() + pieces * ALIGNMENT / 2
    twins.optimizer.zero_grad()


def check_base_is_only_read(twins: RankTwins, written: Written, stage: int) -> None:
    base = list(ranges_of(twins.model, trained=False))
    assert bool(base) == (stage == 3)
    assert not any(written.touches(*each) for each in base)
    assert all(written.touches(*each) for each in ranges_of(twins.model, trained=True))
    assert written.records  # states of adapters, at least
    assert not any(
        twins.optimizer.state.get(p) for n, p in twins.model.named_parameters() if "lora" not in n
    )


def check_states(twins: RankTwins, dtype: str) -> None:
    """Bytes of states are so many times this rank's part of the adapters, padding aside."""
    groups = groups_of(twins.model)
    trained = [r for group in groups for r in group.regions if r.trainable]
    assert not any(r.states for group in groups for r in group.regions if not r.trainable)
    placement = twins.runtime.stats().placement
    total = sum(
        sum(tiers.values()) for name, tiers in placement.items() if name not in ("param", "grad")
    )
    adapters = sum(p.numel() for p in twins.model.parameters() if p.requires_grad)
    mine, each = adapters / world_size(), STATE_BYTES[dtype]
    padded = sum(r.owned.numel for r in trained)
    assert padded - mine < len(trained) * ALIGNMENT / DTYPES[dtype].itemsize
    assert each * mine <= total <= each * padded + 3 * len(trained) * ALIGNMENT


def own_reference(path: str, stage: int) -> None:
    """The model without its adapters is what the one with them is held to."""
    build: Any = functools.partial(Lora, torch.float32)
    twins = make_twins(build, path, Structure(build), **changes_of(stage))

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        now = loss_in_fp32(model, tokens)
        adapted = [module for module in model.modules() if isinstance(module, Adapted)]
        for module in adapted:
            module.enabled = False
        with torch.no_grad():
            fixed = loss_in_fp32(model, tokens)
        for module in adapted:
            module.enabled = True
        return now + (now - fixed).square()

    with twins.runtime:
        for step in range(3):
            twins.step(step, loss)
        twins.check()


def thawed(path: str, stage: int, dtype: str) -> None:
    """More and more of the base is trained too, with masters from then on."""
    build: Any = functools.partial(Lora, DTYPES[dtype])
    twins = make_twins(build, path, Structure(build, loss_in_fp32), **changes_of(stage))
    with twins.runtime:
        twins.step(0)
        for step, part in enumerate(("blocks.0", "blocks.1.up", ""), start=1):
            for model, _ in twins.both:
                model.get_submodule(part).requires_grad_(True)
            twins.step(step)
        twins.check()


CASES: Cases = {
    **{
        f"stage {stage}, {placement}, {dtype}": functools.partial(
            train, stage=stage, placement=placement, dtype=dtype
        )
        for stage, placement, dtype in itertools.product((3, 2), ("nvme", "host"), DTYPES)
    },
    "stage 3, nvme, fp32, checkpointed": functools.partial(
        train, stage=3, placement="nvme", dtype="fp32", model=functools.partial(Lora, checkpointed=True)
    ),
    "stage 3, nvme, bf16, in backward": functools.partial(
        train, stage=3, placement="nvme", dtype="bf16", update="backward"
    ),
    **{
        f"stage {stage}, nvme, bf16 on {base}": functools.partial(
            train,
            stage=stage,
            placement="nvme",
            dtype="bf16",
            model=functools.partial(Lora, quantized=base),
        )
        for stage, base in itertools.product((3, 2), (torch.int8, torch.float8_e4m3fn))
    },
    **{
        f"stage {stage}, its own reference": functools.partial(own_reference, stage=stage)
        for stage in (3, 2)
    },
    **{
        f"stage {stage}, {dtype}, thawed": functools.partial(thawed, stage=stage, dtype=dtype)
        for stage, dtype in itertools.product((3, 2), DTYPES)
    },
}
IN_SHORT = (
    "stage 3, nvme, fp32",
    "stage 3, nvme, bf16",
    "stage 2, host, bf16",
    "stage 3, nvme, fp32, checkpointed",
    "stage 3, its own reference",
    "stage 3, bf16, thawed",
    f"stage 3, nvme, bf16 on {torch.int8}",
)


@pytest.mark.parametrize(("name", "size"), at_sizes(CASES, IN_SHORT.__contains__))
def test_adapters(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
