"""Memory of gathered parameters comes back when the last view has died, and never before."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from zero_models import Block, Plain
from zero_twins import batch

import tiermem
from tiermem.errors import BudgetError


class _Stashing(torch.autograd.Function):
    """Keeps its weight on the context, as one should not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.x = weight, x
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class StashingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _Stashing.apply(_Stashing.apply(x, self.up.weight), self.down.weight)


class Stashing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(StashingBlock() for _ in range(4))


class StashingViewBlock(Block):
    """Keeps a view of its weight on the module between calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned = self.up.weight.t()
        return super().forward(x) + (x @ self.turned)[..., :64] * 0.1


class StashingView(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = StashingViewBlock()


@pytest.mark.parametrize("mode", ["deferred", "backward"])
@pytest.mark.parametrize(("build", "memory"), [(Stashing, "400KiB"), (StashingView, "400KiB")])
def test_stashed_weights_are_never_recycled(make_twins, build, memory: str, mode: str) -> None:
    twins = make_twins(build, update=mode, device_memory=memory)
    twins.steps(4)
    twins.check()


def test_a_view_keeps_its_values_while_others_come_and_go(twins) -> None:
    expected = twins.plain.embedding.weight.detach().clone()
    with torch.no_grad(), tiermem.gathered(twins.model.embedding.weight):
        view = twins.model.embedding.weight[3:9]
    assert torch.equal(view, expected[3:9])
    values_before = view.clone()
    for block in (twins.model.head, twins.model.embedding):
        tiermem.full_param(block.weight)
    assert torch.equal(view, values_before)


@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_full_pool_names_its_holders_and_recovers(make_twins, mode: str) -> None:
    twins = make_twins(update=mode)  # room for one block
    twins.step()
    x = torch.ones(2, 64)
    with torch.no_grad():
        with tiermem.gathered(twins.model.blocks[2].up.weight):
            stash = twins.model.blocks[2].up.weight[:4]
        with pytest.raises(BudgetError, match=r"blocks\.2.*Remedy") as caught:
            twins.model.blocks[1](x)
    assert "blocks.1" in str(caught.value)
    expected = twins.plain.blocks[2].up.weight[:4]
    assert torch.equal(stash, expected)
    del stash, caught
    gc.collect()
    twins.steps(3, first=1)
    twins.check()


def test_budget_error_in_the_middle_of_training_loses_nothing(make_twins) -> None:
    twins = make_twins()
    twins.steps(2)
    with torch.no_grad(), tiermem.gathered(twins.model.blocks[3].down.weight):
        stash = twins.model.blocks[3].down.weight.view(-1)
    with pytest.raises(BudgetError):
        twins.loss(twins.model, batch(2))
    del stash
    gc.collect()
    twins.steps(3, first=2)
    twins.check()


def test_gathering_more_than_fits_is_refused(twins) -> None:
    with pytest.raises(BudgetError, match="Remedy"), tiermem.gathered(twins.model.parameters()):
        pass
    twins.steps(2)
    twins.check()


def test_gathering_all_with_enough_memory(make_twins) -> None:
    twins = make_twins(device_memory="2MiB")
    twins.step()
    with tiermem.gathered(twins.model.parameters()):
        for plain, real in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
            assert type(real) is torch.nn.Parameter
            assert torch.equal(plain, real)
    twins.step(1)
    twins.check()


def test_a_fetch_waits_for_a_release_in_flight(make_twins) -> None:
    """Write-backs hold leases until they are done; with one block's room every fetch meets one."""
    twins = make_twins(prefetch_bytes=0)
    for _ in range(3):
        for model, _ in twins.both:
            with torch.no_grad():
                for block in model.blocks:
                    block.up.weight.mul_(0.9)
                    block.down.weight.mul_(0.9)
    twins.steps(2)
    twins.check()


def test_a_view_keeps_its_values_after_updates_of_its_group(make_twins) -> None:
    """What is looked at stays as it was, though the parameter goes on."""
    twins = make_twins(device_memory="400KiB")
    with torch.no_grad(), tiermem.gathered(twins.model.blocks[0].up.weight):
        view = twins.model.blocks[0].up.weight[:]
    assert not view.isnan().any()
    twins.steps(3)
    assert not view.isnan().any()
    twins.check()


def test_two_groups_fit_wherever_earlier_leases_lay(make_runtime) -> None:
    """Room for two blocks and little more: what was gathered before leaves it in pieces."""
    runtime = make_runtime(device_memory="160KiB")
    model = Plain()
    tiermem.shard(model, runtime)
    with torch.no_grad():
        for _ in range(3):
            for small in (model.embedding, model.head):
                small.weight.sum()
                torch.add(model.blocks[0].up.weight, model.blocks[3].up.weight)
                with tiermem.gathered([model.blocks[1].up.weight, model.blocks[2].up.weight]):
                    pass
