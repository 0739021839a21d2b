"""What is written into a sharded parameter is not lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_models import Plain, Recurrent, Tied
from zero_twins import values

import tiermem
from tiermem.errors import StateError


def _load(model: nn.Module) -> None:
    torch.manual_seed(99)
    model.load_state_dict(Plain().state_dict())


def _initialise(model: nn.Module) -> None:
    torch.manual_seed(5)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            nn.init.xavier_uniform_(param)
        else:
            nn.init.constant_(param, 0.25 if "norm" not in name else 1.0)


@torch.no_grad()
def _multiply(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


@torch.no_grad()
def _operators(model: nn.Module) -> None:
    model.head.weight *= 2.0
    model.blocks[0].up.weight += 0.125
    model.blocks[3].down.bias -= 1.0


def _alias(model: nn.Module) -> None:
    model.blocks[1].up.weight.detach().zero_()
    model.head.weight.detach()[3:7].fill_(0.125)


@torch.no_grad()
def _index(model: nn.Module) -> None:
    model.embedding.weight[5] = 1.0
    model.blocks[2].down.weight[:, 3:5] = 0.5


def _between(model: nn.Module) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.copy_(model.blocks[3].up.weight)
        model.head.weight.copy_(model.embedding.weight)


@torch.no_grad()
def _out(model: nn.Module) -> None:
    source = torch.ones(64, 64)
    torch.add(source, source, out=model.head.weight)


def _reset(model: nn.Module) -> None:
    torch.manual_seed(3)
    model.head.reset_parameters()
    model.blocks[1].down.reset_parameters()


def _apply(model: nn.Module) -> None:
    torch.manual_seed(3)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    model.apply(init)


WRITES = [_load, _initialise, _multiply, _operators, _alias, _index, _between, _out, _reset, _apply]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("moment", ["at first", "after a step"])
def test_writes(make_twins, write, moment: str) -> None:
    # Two groups at once for copies between parameters.
    twins = make_twins(device_memory="160KiB")
    if moment == "after a step":
        twins.steps(2)
    for model, _ in twins.both:
        write(model)
    twins.check()
    twins.steps(2, first=2)
    twins.check()


@pytest.mark.parametrize("build", [Tied, Recurrent])
def test_load_state_dict(make_twins, build) -> None:
    twins = make_twins(build)
    twins.step()
    torch.manual_seed(123)
    state = build().state_dict()
    for model, _ in twins.both:
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys
    twins.check()
    twins.steps(2, first=1)
    twins.check()


@torch.no_grad()
def _inside_forward_hook(module: nn.Module, _: object) -> None:
    module.up.weight.clamp_(-0.05, 0.05)


def test_writes_within_a_forward(twins) -> None:
    for model, _ in twins.both:
        for block in model.blocks:
            block.register_forward_pre_hook(_inside_forward_hook)
    twins.steps(3)
    twins.check()


@pytest.mark.parametrize("modify", [True, False])
def test_gathered_block(twins, modify: bool) -> None:
    twins.step()
    block = twins.model.blocks[1]
    with torch.no_grad():
        for part in twins.plain.blocks[1].parameters():
            part.add_(0.5)
        with tiermem.gathered(block.parameters(), modify=modify):
            for part in block.parameters():
                part.add_(0.5)
    twins.check()
    twins.steps(2, first=1)
    twins.check()


def test_gathered_with_modify_sees_data(twins) -> None:
    twins.step()
    for model, _ in twins.both:
        params = [model.blocks[2].up.weight, model.head.weight]
        for param in params:
            if model is twins.model:
                with tiermem.gathered(param, modify=True):
                    param.data.mul_(0.25)
                    param.data.numpy()[0] = 1.0
            else:
                param.data.mul_(0.25)
                param.data[0] = 1.0
    twins.check()
    twins.steps(2, first=1)
    twins.check()


def test_data_outside_raises_with_the_remedy(twins) -> None:
    weight = twins.model.head.weight
    with pytest.raises(StateError, match=r"tiermem\.gathered"):
        weight.data.zero_()
    with pytest.raises(StateError, match=r"tiermem\.gathered"):
        weight.data = torch.zeros(64, 64)
    with pytest.raises(StateError, match=r"tiermem\.gathered"):
        torch.nn.utils.vector_to_parameters(torch.zeros(10**6), [weight])
    with tiermem.gathered(weight, modify=True):
        assert weight.data.shape == (64, 64)
    with pytest.raises(StateError, match=r"tiermem\.gathered"):
        weight.data.zero_()
    twins.steps(2)
    twins.check()


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage", "share_memory_"])
def test_pointers_raise_with_a_remedy(twins, name: str) -> None:
    with pytest.raises(StateError, match="Remedy"):
        getattr(twins.model.head.weight, name)()
    twins.steps(2)
    twins.check()


def test_an_exception_in_gathered_keeps_what_was_written(twins) -> None:
    weight = twins.model.head.weight

    def write_and_fail() -> None:
        with tiermem.gathered(weight, modify=True):
            weight.data.fill_(0.5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert torch.equal(values(twins.model)["head.weight"], torch.full((64, 64), 0.5))
