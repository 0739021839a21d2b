"""After an exception anywhere in a step, training goes on as plain training does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Checkpointed, Plain, loss_of
from zero_twins import batch

import tiermem


class Bomb:
    """Raises ``error`` once, when armed."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.armed = False

    def __call__(self) -> None:
        if self.armed:
            self.armed = False
            raise self.error("bomb")


class _Exploding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bomb: Bomb) -> torch.Tensor:
        ctx.bomb = bomb
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.bomb()
        return grad, None


class Explosive(nn.Module):
    """A model of ``kind`` with a bomb in the forward and one in the backward of a block."""

    def __init__(self, kind: type[Plain], where: str, error: type[BaseException]) -> None:
        super().__init__()
        self.inner = kind()
        self.bomb = Bomb(error)
        if where == "forward":
            self.inner.blocks[2].up.register_forward_pre_hook(lambda *_: self.bomb())
        else:
            self.inner.blocks[2].register_forward_hook(
                lambda module, args, output: _Exploding.apply(output, self.bomb)
            )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


def explode(model: Explosive, error: type[BaseException], seed: int = 77) -> None:
    model.bomb.armed = True
    with pytest.raises(error):
        loss_of(model, batch(seed)).backward()
    assert not model.bomb.armed


@pytest.mark.parametrize("kind", [Plain, Checkpointed])
@pytest.mark.parametrize("mode", ["deferred", "backward"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_in_forward(make_twins, kind, mode: str, error) -> None:
    twins = make_twins(lambda: Explosive(kind, "forward", error), update=mode)
    for step in range(3):
        for model, _ in twins.both:
            explode(model, error)
        twins.step(step)
    twins.check()


@pytest.mark.parametrize("kind", [Plain, Checkpointed])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_in_backward(make_twins, kind, error) -> None:
    twins = make_twins(lambda: Explosive(kind, "backward", error))
    for step in range(3):
        for model, optimizer in twins.both:
            explode(model, error)
            optimizer.zero_grad()  # what had been accumulated before the error
        twins.step(step)
    twins.check()


def test_partial_gradients_of_a_failed_backward_are_kept(make_twins) -> None:
    """As in plain torch: what was accumulated before the error is there, and used by step()."""
    twins = make_twins(lambda: Explosive(Plain, "backward", ZeroDivisionError))
    for step in range(3):
        for model, _ in twins.both:
            explode(model, ZeroDivisionError)
        twins.step(step)  # adds to the partial gradients
    twins.check()


def test_failed_backward_in_backward_mode_is_right_or_refused(make_twins) -> None:
    """Some groups are updated already: going on must not half-apply a step silently."""
    twins = make_twins(lambda: Explosive(Plain, "backward", ZeroDivisionError), update="backward")
    twins.steps(2)
    for model, optimizer in twins.both:
        explode(model, ZeroDivisionError)
        optimizer.step()  # with the partial gradients, in both
        optimizer.zero_grad()
    twins.steps(2, first=2)
    twins.check()


def test_shape_error_of_the_user(twins) -> None:
    twins.step()
    with pytest.raises(RuntimeError, match=r"shapes|size"):
        twins.model.blocks[1](torch.ones(3, 5))
    with pytest.raises(IndexError):
        twins.model(torch.full((2, 2), 10_000))
    twins.steps(2, first=1)
    twins.check()


def test_slots_hold_placeholders_again(make_twins) -> None:
    twins = make_twins(lambda: Explosive(Plain, "forward", KeyboardInterrupt))
    before = list(twins.model.parameters())
    explode(twins.model, KeyboardInterrupt)
    loss_of(twins.model, batch(0))
    assert all(a is b for a, b in zip(before, twins.model.parameters(), strict=True))
    assert all(group.uses == 0 for group in twins.runtime.groups)


def _fail(weight: torch.Tensor) -> None:
    raise ValueError(f"a function of {tuple(weight.shape)} that fails")


@pytest.mark.parametrize("where", ["forward", "recompute", "argument"])
def test_a_kept_exception_does_not_keep_parameters(make_twins, where: str) -> None:
    """A notebook keeps the last one, with the frames it went through. One unit fits at a time."""
    twins = make_twins(Checkpointed if where == "recompute" else Plain)
    kept: list[ValueError] = []
    for block in range(4):
        module = twins.model.blocks[block]
        armed = [where != "recompute", where != "recompute"]

        def hook(self: nn.Module, *_: Any, armed: list[bool] = armed) -> None:
            weight = self.up.weight
            if armed[0]:
                armed[0] = False
                _fail(weight) if where == "argument" else _fail(self.down.weight)

        handle = module.register_forward_pre_hook(hook)
        if where == "recompute":
            loss = loss_of(twins.model, batch(3))
            armed[0] = True
        with pytest.raises(ValueError, match="that fails") as caught:
            loss.backward() if where == "recompute" else loss_of(twins.model, batch(3)).backward()
        kept.append(caught.value)
        handle.remove()
        twins.optimizer.zero_grad()
        twins.steps(1, first=block)
    twins.check()
    assert len(kept) == 4


def test_a_write_back_that_fails_does_not_keep_the_other_groups(
    twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several groups gathered together is given back."""
    settle = twins.runtime.gather.settle
    blocks = [twins.model.blocks[0], twins.model.blocks[0].norm]
    params = [p for block in blocks for p in block.parameters()]
    calls = []

    def failing(group: Any, **options: Any) -> None:
        calls.append(group)
        if len(calls) == 1:
            raise ValueError("the first one")
        settle(group, **options)

    with pytest.raises(ValueError, match="the first one"), tiermem.gathered(params):
        monkeypatch.setattr(twins.runtime.gather, "settle", failing)
    assert all(group.uses == 0 for group in twins.runtime.groups)
    monkeypatch.undo()
    twins.steps(2)
    twins.check()
