"""``grad``, ``requires_grad`` and hooks of a placeholder mean those of its parameter."""

from __future__ import annotations

import pytest
import torch
from zero_models import loss_of
from zero_twins import batch

import tiermem
from tiermem.errors import StateError


def backward_both(twins, seed: int = 0) -> None:
    for model, _ in twins.both:
        loss_of(model, batch(seed)).backward()


def test_full_grad_is_the_gradient(twins) -> None:
    assert tiermem.full_grad(twins.model.head.weight) is None
    backward_both(twins)
    for plain, sharded in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
        assert torch.equal(plain.grad, tiermem.full_grad(sharded))


def test_grad_is_none_before_backward_and_after_zero_grad(twins) -> None:
    assert all(p.grad is None for p in twins.model.parameters())
    backward_both(twins)
    assert all(p.grad is not None for p in twins.model.parameters())
    twins.optimizer.zero_grad()
    assert all(p.grad is None for p in twins.model.parameters())
    backward_both(twins)
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    assert all(p.grad is None for p in twins.model.parameters())


def test_stand_in_has_the_true_metadata(twins) -> None:
    backward_both(twins)
    for plain, sharded in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
        stand_in = sharded.grad
        assert stand_in.shape == plain.grad.shape
        assert stand_in.dtype == plain.grad.dtype
        assert stand_in.device == plain.grad.device
        assert not stand_in.requires_grad
        assert stand_in.type() == plain.grad.type()
        assert stand_in.is_same_size(sharded)
        assert "embedding.weight" in repr(twins.model.embedding.weight.grad)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_torch_clipping_raises_with_the_remedy(twins, foreach) -> None:
    backward_both(twins)
    with pytest.raises(StateError, match=r"opt\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0, foreach=foreach)
    with pytest.raises(StateError, match=r"opt\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_value_(twins.model.parameters(), 1.0, foreach=foreach)
    for _, optimizer in twins.both:
        optimizer.step()
        optimizer.zero_grad()
    twins.check()


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_torch_optimizers_raise_with_the_remedy(make_twins, kind: str, foreach: bool | None) -> None:
    twins = make_twins()
    foreign = getattr(torch.optim, kind)(twins.model.parameters(), lr=1e-2, foreach=foreach)
    backward_both(twins)
    with pytest.raises(StateError, match=r"tiermem\.optim\.AdamW.*clip_grad_norm_.*full_grad"):
        foreign.step()
    for _, optimizer in twins.both:
        optimizer.step()
        optimizer.zero_grad()
    twins.check()


def test_grad_scaler_raises_with_the_remedy(twins) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(twins.model, batch(0))).backward()
    with pytest.raises(StateError, match=r"tiermem\.optim\.AdamW.*GradScaler"):
        scaler.step(twins.optimizer)


def test_own_clipping_is_torchs(twins) -> None:
    for step in range(3):
        backward_both(twins, step)
        expected = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 1e-3)
        found = twins.optimizer.clip_grad_norm_(1e-3)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        for _, optimizer in twins.both:
            optimizer.step()
            optimizer.zero_grad()
    for plain, sharded in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
        torch.testing.assert_close(tiermem.full_param(sharded), plain.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("to_none", [True, False])
def test_model_zero_grad_forgets(twins, to_none: bool) -> None:
    for model, _ in twins.both:
        loss_of(model, batch(5)).backward()
        model.zero_grad(set_to_none=to_none)
    twins.steps(2)
    twins.check()


@pytest.mark.parametrize("to_none", [True, False])
def test_optimizer_zero_grad_forgets(twins, to_none: bool) -> None:
    for model, optimizer in twins.both:
        loss_of(model, batch(5)).backward()
        optimizer.zero_grad(set_to_none=to_none)
    twins.steps(2)
    twins.check()


def test_grad_set_by_hand_is_used(twins) -> None:
    for model, optimizer in twins.both:
        loss_of(model, batch(0)).backward()
        generator = torch.Generator().manual_seed(3)
        model.head.weight.grad = torch.randn(64, 64, generator=generator)
        model.blocks[1].up.weight.grad = None
        del model.blocks[2].up.bias.grad
        optimizer.step()
        optimizer.zero_grad()
    twins.check()


def test_grad_set_before_any_backward_is_used(twins) -> None:
    for model, optimizer in twins.both:
        model.head.weight.grad = torch.ones(64, 64)
        optimizer.step()
        optimizer.zero_grad()
    twins.check()


def test_grad_of_a_wrong_shape_is_refused(twins) -> None:
    with pytest.raises((StateError, RuntimeError), match=r"\(3, 3\)|size|shape"):
        twins.model.head.weight.grad = torch.ones(3, 3)
    twins.steps(2)
    twins.check()


def test_register_hook_changes_the_gradient(twins) -> None:
    for model, _ in twins.both:
        model.blocks[0].down.weight.register_hook(lambda grad: grad * 3)
    twins.steps(3)
    twins.check()


def test_register_hook_can_be_removed(twins) -> None:
    for model, _ in twins.both:
        model.blocks[0].down.weight.register_hook(lambda grad: grad * 3).remove()
    twins.steps(2)
    twins.check()


def test_post_accumulate_hook_sees_the_gradient(twins) -> None:
    seen: list[list[torch.Tensor]] = [[], []]
    for (model, _), log in zip(twins.both, seen, strict=True):
        for param in (model.blocks[0].down.weight, model.head.weight):
            param.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
    twins.steps(2)
    assert len(seen[0]) == len(seen[1]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    twins.check()


def test_post_accumulate_hook_may_change_the_gradient(twins) -> None:
    def double(param: torch.Tensor) -> None:
        param.grad.mul_(2)

    handles = [m.blocks[0].up.weight.register_post_accumulate_grad_hook(double) for m, _ in twins.both]
    twins.steps(2)
    for handle in handles:
        handle.remove()
    twins.steps(2, first=2)
    twins.check()


def test_autograd_grad_with_respect_to_parameters(make_twins) -> None:
    twins = make_twins(device_memory="2MiB")
    found = [torch.autograd.grad(loss_of(m, batch(0)), list(m.parameters())) for m, _ in twins.both]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(p.grad is None for p in twins.model.parameters())
    twins.steps(2)
    twins.check()


def test_backward_with_inputs_is_right_or_refused(make_twins) -> None:
    twins = make_twins(device_memory="2MiB")
    plain, sharded = twins.plain, twins.model
    loss_of(plain, batch(0)).backward(inputs=[plain.head.weight, plain.blocks[0].up.weight])
    loss = loss_of(sharded, batch(0))
    try:
        loss.backward(inputs=[sharded.head.weight, sharded.blocks[0].up.weight])
    except StateError:
        return  # said so, with a remedy
    for name, param in plain.named_parameters():
        found = tiermem.full_grad(dict(sharded.named_parameters())[name])
        assert (param.grad is None) == (found is None), name
        assert param.grad is None or torch.equal(param.grad, found), name


def test_requires_grad_is_the_parameters(twins) -> None:
    weight = twins.model.blocks[0].up.weight
    weight.requires_grad = False
    assert not weight.requires_grad
    assert weight.requires_grad_() is weight
    assert weight.requires_grad
    twins.model.blocks[1].requires_grad_(False)
    assert not any(p.requires_grad for p in twins.model.blocks[1].parameters())
    output = twins.model.blocks[1](torch.ones(2, 64))
    assert not output.requires_grad


def test_a_gradient_assigned_before_the_last_update_was_applied(twins) -> None:
    """The pending update's gradients lie on NVMe: the new ones must not take their place."""
    for seed in (1, 2):
        for model, optimizer in twins.both:
            for number, param in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(seed * 100 + number)
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
    twins.check()
