"""Models that begin on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero_models import Attention, Block, Convolutions, Nested, Plain, Recurrent, Tied, loss_of
from zero_twins import batch, different, values

import tiermem
from tiermem.errors import StateError


def on_meta(build) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("build", [Plain, Tied, Recurrent, Nested, Convolutions])
def test_default_initialisation(make_runtime, build) -> None:
    model = on_meta(build)
    tiermem.shard(model, make_runtime())
    for name, value in values(model).items():
        assert value.isfinite().all(), name
        if value.dim() > 1:
            assert value.std() > 0, name
    assert all(b.device.type == "cpu" for b in model.buffers())
    assert loss_of(model, batch(0)).isfinite()


def test_default_initialisation_is_that_of_the_modules(make_runtime) -> None:
    model = on_meta(Plain)
    torch.manual_seed(0)
    tiermem.shard(model, make_runtime())
    found = values(model)
    assert torch.equal(found["blocks.0.norm.weight"], torch.ones(64))
    assert torch.equal(found["blocks.0.norm.bias"], torch.zeros(64))
    bound = 1 / 8  # of a Linear with 64 inputs
    weight = found["blocks.2.up.weight"]
    assert weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.1)


def _constant(module: nn.Module, name: str) -> None:
    for key, param in module.named_parameters(recurse=False):
        param.fill_(sum(map(ord, f"{name}.{key}")) / 4096)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(2)


@pytest.mark.parametrize("build", [Plain, Recurrent, Attention, Convolutions, Nested])
def test_init_function(make_runtime, build) -> None:
    model = on_meta(build)
    called: list[str] = []

    def init(module: nn.Module, name: str) -> None:
        called.append(name)
        assert all(p.device.type == "cpu" for p in module.parameters(recurse=False))
        assert not torch.is_grad_enabled()
        _constant(module, name)

    tiermem.shard(model, make_runtime(), init=init)
    assert len(called) == len(set(called))
    for name, value in values(model).items():
        assert torch.equal(value, torch.full_like(value, sum(map(ord, name)) / 4096)), name
    assert all((b == 2).all() for b in model.buffers())


def test_tied_parameters_are_initialised_by_the_first(make_runtime) -> None:
    model = on_meta(Tied)
    tiermem.shard(model, make_runtime(), init=_constant)
    assert model.head.weight is model.embedding.weight
    first = sum(map(ord, "embedding.weight")) / 4096
    assert (values(model)["embedding.weight"] == first).all()


def test_training_from_meta_is_training(make_twins, make_runtime) -> None:
    def seeded(module: nn.Module, name: str) -> None:
        torch.manual_seed(len(name))
        for param in module.parameters(recurse=False):
            param.normal_(std=0.1)

    model = on_meta(Plain)
    tiermem.shard(model, make_runtime(), init=seeded)
    plain = Plain()
    with torch.no_grad():
        for name, module in plain.named_modules():
            seeded(module, name)
    assert different(plain, model) == []
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        tiermem.optim.AdamW(model.parameters(), lr=1e-2),
    ]
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            loss_of(each, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert different(plain, model) == []


def test_bf16_masters_keep_the_initial_precision(make_runtime) -> None:
    model = on_meta(Plain)
    seen: dict[str, torch.Tensor] = {}

    def init(module: nn.Module, name: str) -> None:
        for key, param in module.named_parameters(recurse=False):
            assert param.dtype == torch.float32
            param.normal_()
            seen[f"{name}.{key}"] = param.clone()

    tiermem.shard(model, make_runtime(compute_dtype="bf16"), init=init)
    for name, param in model.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(tiermem.full_master(param), seen[name]), name


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))


class WithStubborn(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.stubborn = Stubborn()


def test_modules_without_reset_are_named_before_anything_changes(make_runtime) -> None:
    model = on_meta(WithStubborn)
    runtime = make_runtime()
    before = list(model.parameters())
    with pytest.raises(StateError, match=r"stubborn.*init="):
        tiermem.shard(model, runtime)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert runtime.groups == []
    tiermem.shard(model, runtime, init=_constant)
    assert values(model)["stubborn.weight"].isfinite().all()


class _Buffered(nn.Module):
    """A buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(64.0))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(64.0))
        self.scratch.fill_(3)


def test_meta_buffers(make_runtime) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), _Buffered(), nn.BatchNorm1d(64)))
    tiermem.shard(model, make_runtime())
    assert torch.equal(model[1].table, torch.arange(64.0))
    assert torch.equal(model[1].scratch, torch.full((4,), 3.0))
    assert torch.equal(model[2].running_var, torch.ones(64))
    assert model[2].num_batches_tracked.item() == 0
    assert "1.scratch" not in model.state_dict()


class _Masked(nn.Linear):
    """Its inherited reset_parameters() knows nothing of the buffers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__(width, width)
        self.register_buffer("mask", torch.ones(width, width).tril())
        self.register_buffer("on", torch.ones((), dtype=torch.bool), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(64))

    def reset_parameters(self) -> None:
        """Forgets the table."""


@pytest.mark.parametrize(
    ("build", "message"),
    [(_Masked, r"'1' \(_Masked\).*: mask, on\."), (_Table, r"'1' \(_Table\).*: table\.")],
)
def test_buffers_that_nothing_filled_are_named(make_runtime, build, message: str) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), build()))
    with pytest.raises(StateError, match=message + ".*reset_parameters.*init="):
        tiermem.shard(model, make_runtime())


def test_buffers_that_an_init_function_forgets_are_named(make_runtime) -> None:
    model = on_meta(_Masked)
    with pytest.raises(StateError, match=r"'the model' \(_Masked\).*mask, on"):
        tiermem.shard(model, make_runtime(), init=lambda module, name: None)


@pytest.mark.parametrize("way", ["in place", "replaced", "data", "numpy"])
def test_buffers_count_as_filled_whichever_way(make_runtime, way: str) -> None:
    def init(module: nn.Module, name: str) -> None:
        module.on.fill_(True)
        if way == "in place":
            module.mask.view(torch.int32).fill_(-0x5A5A5A5B)  # what they were filled with before
        elif way == "replaced":
            module.mask = torch.ones(64, 64)
        elif way == "data":
            module.mask.data.fill_(2)
        else:
            module.mask.numpy()[:] = 3

    model = on_meta(_Masked)
    tiermem.shard(model, make_runtime(), init=init)
    assert model.on.item() is True
    expected = {"replaced": 1, "data": 2, "numpy": 3}.get(way, model.mask[0, 0].item())
    assert torch.equal(model.mask, torch.full((64, 64), float(expected)))


def test_partly_on_meta(make_runtime) -> None:
    model = Plain()
    expected = model.embedding.weight.detach().clone()
    with torch.device("meta"):
        model.blocks[1] = Block()
    tiermem.shard(model, make_runtime())
    assert torch.equal(values(model)["embedding.weight"], expected)
    assert values(model)["blocks.1.up.weight"].isfinite().all()
    assert loss_of(model, batch(0)).isfinite()


def test_frozen_on_meta_stays_frozen(make_runtime) -> None:
    model = on_meta(Plain)
    model.blocks.requires_grad_(False)
    tiermem.shard(model, make_runtime())
    assert not model.blocks[0].up.weight.requires_grad
    assert model.head.weight.requires_grad
