"""A step that has been called has happened, whoever looks and whatever is called next."""

from __future__ import annotations

import math

import pytest
import torch
from zero_models import Plain, Tied, loss_of
from zero_twins import batch, different

import tiermem


def one_step(twins, seed: int = 0) -> None:
    """step(); zero_grad(); and no further forward."""
    for model, optimizer in twins.both:
        loss_of(model, batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _params(twins) -> None:
    assert different(twins.plain, twins.model) == []


def _use(twins) -> None:
    for plain, sharded in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
        assert plain.sum().item() == sharded.sum().item()


def _states(twins) -> None:
    for plain, sharded in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
        found = twins.optimizer.state[sharded]
        expected = twins.plain_optimizer.state[plain]
        assert torch.equal(found["exp_avg"], expected["exp_avg"])
        assert torch.equal(found["exp_avg_sq"], expected["exp_avg_sq"])
        assert found["step"] == expected["step"]


def _state_dict(twins) -> None:
    expected, found = twins.plain.state_dict(), twins.model.state_dict()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def _optimizer_state_dict(twins) -> None:
    expected, found = (optimizer.state_dict()["state"] for _, optimizer in twins.both)
    assert list(expected) == list(found)
    for index, state in expected.items():
        assert torch.equal(state["exp_avg_sq"], found[index]["exp_avg_sq"])


def _gathered(twins) -> None:
    with tiermem.gathered(twins.model.head.weight):
        assert torch.equal(twins.plain.head.weight, twins.model.head.weight)


def _drain(twins) -> None:
    twins.runtime.drain()
    _params(twins)


LOOKS = [_params, _use, _states, _state_dict, _optimizer_state_dict, _gathered, _drain]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_whoever_looks_sees_the_step(make_twins, mode: str, look) -> None:
    twins = make_twins(Tied if look is _state_dict else Plain, update=mode)
    for seed in range(2):
        one_step(twins, seed)
        look(twins)
    twins.check()


def test_later_changes_of_options_do_not_touch_a_pending_update(twins) -> None:
    for seed in range(3):
        one_step(twins, seed)
        for _, optimizer in twins.both:
            group = optimizer.param_groups[0]
            group["lr"] *= 0.5
            group["weight_decay"] += 0.1
            group["betas"] = (0.8, 0.9)
    twins.check()


def test_scheduler(twins) -> None:
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.1 + math.cos(step) ** 2)
        for _, o in twins.both
    ]
    for seed in range(5):
        one_step(twins, seed)
        for scheduler in schedulers:
            scheduler.step()
    twins.check()


def test_scheduler_with_a_closed_form(twins) -> None:
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=6) for _, o in twins.both
    ]
    for seed in range(5):
        one_step(twins, seed)
        for scheduler in schedulers:
            scheduler.step()
    twins.check()


def test_tensor_lr_is_read_at_step(make_twins) -> None:
    twins = make_twins(lr=torch.tensor(1e-2))
    for seed in range(3):
        one_step(twins, seed)
        for _, optimizer in twins.both:
            optimizer.param_groups[0]["lr"].mul_(0.5)  # in place: what is pending has a copy
    assert different(twins.plain, twins.model) == []


def test_several_steps_without_a_forward(twins) -> None:
    for model, optimizer in twins.both:
        for seed in range(3):
            loss_of(model, batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()  # nothing to do
    twins.check()


def test_step_without_gradients_does_nothing(twins) -> None:
    for _, optimizer in twins.both:
        optimizer.step()
    assert len(twins.optimizer.state) == 0
    twins.check()


def test_gradients_kept_without_zero_grad_are_used_again(twins) -> None:
    """Plain torch accumulates until zero_grad(); a pending update owns its gradients, but the next
    backward adds to what is still there."""
    for seed in range(3):
        for model, optimizer in twins.both:
            loss_of(model, batch(seed)).backward()
            optimizer.step()
            if seed == 0:
                optimizer.zero_grad()
            else:
                model.zero_grad()
    twins.check()


def test_a_write_after_step_lands_on_the_stepped_values(twins) -> None:
    for seed in range(2):
        one_step(twins, seed)
        with torch.no_grad():
            for model, _ in twins.both:
                model.blocks[1].up.weight.mul_(0.5)
                model.head.weight[3] = 0.25
    twins.check()


def test_closure(twins) -> None:
    results = []
    for seed in range(3):
        for model, optimizer in twins.both:

            def closure(model=model, optimizer=optimizer, seed=seed) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch(seed))
                loss.backward()
                return loss

            results.append(optimizer.step(closure).item())
    assert results[0::2] == results[1::2]
    twins.check()


def test_close_applies_what_is_pending(make_twins, tmp_path) -> None:
    twins = make_twins()
    one_step(twins)
    twins.runtime.close()
    twins.runtime.close()
