"""A parameter that is written in bf16 becomes its own master; its neighbours keep theirs."""

from __future__ import annotations

import pytest
import torch
from zero_models import Plain, loss_of
from zero_twins import batch

import tiermem


@pytest.fixture
def trained(make_runtime):
    """A bf16 model after two steps, and the copies of its masters."""
    runtime = make_runtime(compute_dtype="bf16")
    torch.manual_seed(7)
    model = tiermem.shard(Plain(), runtime)
    optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        loss_of(model, batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, {name: tiermem.full_master(p) for name, p in model.named_parameters()}


def _multiply(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.mul_(0.5)


def _alias(param: torch.Tensor) -> None:
    param.detach().fill_(0.3)


def _pointer(param: torch.Tensor) -> None:
    with tiermem.gathered(param, modify=True):
        param.data.add_(0.1)


def _initialise(param: torch.Tensor) -> None:
    torch.nn.init.uniform_(param)


@pytest.mark.parametrize("name", ["blocks.1.up.weight", "blocks.1.norm.weight"])
@pytest.mark.parametrize("write", [_multiply, _alias, _pointer, _initialise])
def test_remainder_of_the_written_parameter_only(trained, name: str, write) -> None:
    model, before = trained
    named = dict(model.named_parameters())
    assert any(not torch.equal(m, m.bfloat16().float()) for m in before.values())
    write(named[name])
    after = {key: tiermem.full_master(param) for key, param in named.items()}
    assert torch.equal(after[name], tiermem.full_param(named[name]).float())
    assert not torch.equal(after[name], before[name])
    whole_group = write is _pointer  # nobody knows which ones were written through pointers
    for key, master in after.items():
        if key != name and not (whole_group and key.startswith("blocks.1.")):
            assert torch.equal(master, before[key]), key


def test_load_state_dict_makes_masters(trained) -> None:
    model, _ = trained
    torch.manual_seed(4)
    state = Plain().bfloat16().state_dict()
    model.load_state_dict(state)
    for name, param in model.named_parameters():
        assert torch.equal(tiermem.full_master(param), state[name].float()), name


def test_set_full_master_is_exact(trained) -> None:
    model, before = trained
    param = model.blocks[2].down.weight
    master = torch.randn(64, 128)
    tiermem.set_full_master(param, master)
    assert torch.equal(tiermem.full_master(param), master)
    assert torch.equal(tiermem.full_master(model.blocks[2].up.weight), before["blocks.2.up.weight"])
