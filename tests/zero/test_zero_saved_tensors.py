"""What autograd keeps of sharded weights is right in every kind of backward, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_models import WIDTH, Checkpointed, Plain, loss_of
from zero_twins import batch

import tiermem
from tiermem.errors import StateError


class Smooth(nn.Module):
    """Twice differentiable, with an input of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _input(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


def gradient_penalty(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    x = _input(int(tokens.sum()))
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return grad.square().mean() + model(x).mean()


def test_double_backward(make_twins) -> None:
    # create_graph saves raw views, which hold their leases: all three layers have to fit.
    twins = make_twins(Smooth, loss=gradient_penalty, device_memory="256KiB")
    twins.steps(3)
    twins.check()


def test_gradient_of_the_input_only(make_twins) -> None:
    twins = make_twins(Smooth, loss=lambda model, tokens: model(_input(0)).square().mean())
    found = []
    for model, _ in twins.both:
        x = _input(1)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x)
        found.append(grad)
    assert torch.equal(*found)
    assert all(p.grad is None for p in twins.model.parameters())
    twins.steps(2)
    twins.check()


@pytest.mark.parametrize("build", [Plain, Checkpointed])
def test_retained_graph_twice(make_twins, build) -> None:
    twins = make_twins(build)
    for step in range(3):
        for model, optimizer in twins.both:
            loss = loss_of(model, batch(step))
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_graphs_alive(twins, order) -> None:
    for step in range(3):
        for model, optimizer in twins.both:
            losses = [loss_of(model, batch(step)), loss_of(model, batch(step + 10))]
            for index in order:
                losses[index].backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.check()


def test_backward_after_step_raises(make_twins) -> None:
    twins = make_twins()
    early = loss_of(twins.model, batch(9))
    twins.step()
    with pytest.raises(StateError, match="Remedy"):
        early.backward()
    del early
    twins.optimizer.zero_grad()
    twins.steps(2, first=1)
    twins.check()


def test_backward_after_a_write_raises(twins) -> None:
    early = loss_of(twins.model, batch(9))
    for model, _ in twins.both:
        with torch.no_grad():
            model.blocks[2].up.weight.mul_(0.5)
    with pytest.raises((StateError, RuntimeError), match="modified"):
        early.backward()
    del early
    twins.optimizer.zero_grad()
    twins.steps(2)
    twins.check()


def test_a_graph_that_is_dropped_holds_nothing(twins) -> None:
    for _ in range(3):
        loss_of(twins.model, batch(0))
    assert all(group.handles == 0 for group in twins.runtime.groups)
    twins.steps(2)
    twins.check()


def test_second_backward_without_retain_raises_torchs_error(twins) -> None:
    loss = loss_of(twins.model, batch(0))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    del loss
    twins.optimizer.zero_grad()
    twins.steps(2)
    twins.check()


def test_disabled_hooks_raise_with_the_remedy(twins) -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(StateError, match=r"not here.*Remedy"),
    ):
        loss_of(twins.model, batch(0))
    twins.steps(2)
    twins.check()


def test_disabled_hooks_without_gradients_are_no_concern(twins) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), torch.no_grad():
        found = loss_of(twins.model, batch(0))
    assert found.item() == loss_of(twins.plain, batch(0)).item()


def test_hooks_of_the_user_see_activations_and_not_weights(twins) -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(twins.model, batch(0))
    assert seen
    loss.backward()
    loss_of(twins.plain, batch(0)).backward()
    for plain, sharded in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
        assert torch.equal(plain.grad, tiermem.full_grad(sharded))


def test_saved_weights_hold_no_memory(twins) -> None:
    """A whole forward of weights is saved with room for one unit."""
    loss = loss_of(twins.model, batch(0))
    stats = twins.runtime.stats()
    held = sum(group.nbytes for group in twins.runtime.groups if not group.persistent)
    assert held > 3 * stats.device.budget
    loss.backward()
    assert twins.runtime.stats().device.peak <= stats.device.budget
