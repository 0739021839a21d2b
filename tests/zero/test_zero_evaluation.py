"""Forwards without gradients, at any time, disturb nothing and see the newest values."""

from __future__ import annotations

import pytest
import torch
from zero_models import Attention, Convolutions, Dropout, Plain, loss_of
from zero_twins import batch


def _no_grad(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, batch(50)).item()


def _inference(model: torch.nn.Module) -> float:
    with torch.inference_mode():
        return loss_of(model, batch(50)).item()


def _grad_not_used(model: torch.nn.Module) -> float:
    return loss_of(model, batch(50)).item()


EVALUATIONS = [_no_grad, _inference, _grad_not_used]


@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_between_forward_and_backward(make_twins, mode: str) -> None:
    twins = make_twins(update=mode)
    found = []
    for step in range(3):
        for model, optimizer in twins.both:
            loss = loss_of(model, batch(step))
            found.append([evaluate(model) for evaluate in EVALUATIONS])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found[0::2] == found[1::2]
    twins.check()


@pytest.mark.parametrize("mode", ["deferred", "backward"])
@pytest.mark.parametrize("build", [Plain, Dropout, Convolutions, Attention])
def test_between_steps(make_twins, build, mode: str) -> None:
    twins = make_twins(build, update=mode)
    for step in range(3):
        twins.step(step)
        found = []
        for model, _ in twins.both:
            model.eval()
            found.append([evaluate(model) for evaluate in EVALUATIONS])
            model.train()
        assert found[0] == found[1]
    twins.check()


@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_between_backward_and_step(make_twins, mode: str) -> None:
    twins = make_twins(update=mode)
    for step in range(3):
        for model, optimizer in twins.both:
            loss_of(model, batch(step)).backward()
            if mode == "deferred":
                _no_grad(model)
                _inference(model)
            optimizer.step()
            optimizer.zero_grad()
    twins.check()


def test_first_use_under_inference_mode(twins) -> None:
    assert _inference(twins.model) == _inference(twins.plain)
    twins.steps(3)
    twins.check()


def test_built_and_sharded_under_inference_mode_off(make_twins) -> None:
    with torch.no_grad():
        twins = make_twins()
    twins.steps(2)
    twins.check()


def test_aborted_midway(twins) -> None:
    """Only some blocks were evaluated: the recorded order of uses does not hold."""
    twins.step()
    for count in (1, 3, 2):
        with torch.no_grad():
            for block in twins.model.blocks[:count]:
                block(torch.ones(2, 64))
        twins.step(count)
    twins.check()


def test_generator_left_unfinished(twins) -> None:
    def stream(model: torch.nn.Module):
        x = model.embedding(batch(0))
        for block in model.blocks:
            x = block(x)
            yield x

    with torch.no_grad():
        kept = stream(twins.model)
        next(kept)
        next(kept)
    twins.steps(2)
    del kept
    twins.steps(2, first=2)
    twins.check()


def test_evaluation_of_a_part(twins) -> None:
    twins.step()
    with torch.no_grad():
        found = [model.blocks[2](torch.ones(2, 64)) for model, _ in twins.both]
    assert torch.equal(*found)
    twins.step(1)
    twins.check()
