"""Tensors that somebody else puts into a sharded module's slots."""

from __future__ import annotations

import pytest
import torch
from zero_models import Plain, Tied
from zero_twins import batch

from tiermem.errors import StateError


@pytest.mark.parametrize("build", [Plain, Tied])
def test_functional_call_uses_the_given_tensors(make_twins, build) -> None:
    twins = make_twins(build)
    torch.manual_seed(11)
    other = build()
    state = dict(other.named_parameters())
    found = torch.func.functional_call(twins.model, state, (batch(0),))
    assert torch.equal(found, other(batch(0)))
    found.square().mean().backward()
    grads = {name: param.grad.clone() for name, param in other.named_parameters()}
    other.zero_grad()
    other(batch(0)).square().mean().backward()
    for name, param in other.named_parameters():
        assert torch.equal(param.grad, grads[name]), name
    assert all(p.grad is None for p in twins.model.parameters())
    twins.steps(3)
    twins.check()


def test_functional_call_of_some(twins) -> None:
    given = {"head.weight": torch.ones(64, 64), "blocks.1.up.weight": torch.zeros(128, 64)}
    expected = torch.func.functional_call(twins.plain, given, (batch(0),))
    assert torch.equal(torch.func.functional_call(twins.model, given, (batch(0),)), expected)
    twins.steps(2)
    twins.check()


def test_functional_call_under_func_grad(twins) -> None:
    torch.manual_seed(11)
    other = Plain()
    state = {name: param.detach() for name, param in other.named_parameters()}

    def loss(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(twins.model, state, (batch(0),)).square().mean()

    found = torch.func.grad(loss)(state)
    other(batch(0)).square().mean().backward()
    for name, param in other.named_parameters():
        torch.testing.assert_close(found[name], param.grad, msg=name)
    twins.steps(2)
    twins.check()


def test_func_grad_through_sharded_weights_raises_with_the_remedy(twins) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return twins.model.blocks[0](x).square().mean()

    with pytest.raises(StateError, match="functional_call"):
        torch.func.grad(loss)(torch.ones(2, 64))
    twins.steps(2)
    twins.check()


def test_assigning_load_raises_with_the_remedy(twins) -> None:
    with pytest.raises(StateError, match="without assign"):
        twins.model.load_state_dict(Plain().state_dict(), assign=True)
    twins.steps(2)
    twins.check()


def test_a_replaced_parameter_stays_replaced(twins) -> None:
    """A slot that the user has filled with a parameter of their own is left alone."""
    mine = torch.nn.Parameter(torch.full((64, 64), 0.01))
    twins.model.head.weight = mine
    x = torch.ones(2, 64)
    assert torch.equal(twins.model.head(x), x @ mine.t())
    assert twins.model.head.weight is mine


@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused_and_leaves_everything_usable(twins, grad: bool) -> None:
    x = torch.ones(3, 64)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(StateError, match="forward-mode"),
    ):
        torch.func.jvp(twins.model.head, (x,), (x,))
    weight = twins.model.head.weight
    with pytest.raises(StateError, match="forward-mode"):
        torch.func.jvp(lambda y: y @ weight, (x,), (x,))
    twins.steps(2)
    twins.check()
