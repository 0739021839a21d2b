"""Inside a `tiermem.gathered` block users have the real parameters; what they do to them counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tiermem
from tiermem.errors import ConfigError, StateError
from tiermem.zero import GatheredParameters


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


@pytest.fixture(params=["fp32", "bf16"])
def runtime(request: pytest.FixtureRequest) -> Iterator[tiermem.Runtime]:
    config = {"device": "cpu", "host_memory": "64MiB", "persistence_threshold_numel": 0}
    with tiermem.Runtime({**config, "compute_dtype": request.param}) as opened:
        yield opened


@pytest.mark.parametrize("modify", [True, False])
def test_data_that_are_replaced_are_kept(modify: bool, runtime: tiermem.Runtime) -> None:
    model = tiermem.shard(make(), runtime)
    optimizer = tiermem.optim.AdamW(model.parameters())
    dtype = model[0].weight.dtype
    with tiermem.gathered(model[0].weight, modify=modify):
        model[0].weight.data = torch.full((64, 64), 0.5, dtype=dtype)
        assert torch.equal(model[0].weight, torch.full((64, 64), 0.5, dtype=dtype))
    assert torch.equal(tiermem.full_master(model[0].weight), torch.full((64, 64), 0.5))
    model(torch.ones(1, 64, dtype=dtype)).float().sum().backward()
    optimizer.step()
    with pytest.raises(StateError, match="were replaced by others of shape"):  # noqa: SIM117
        with tiermem.gathered(model[0].weight):
            model[0].weight.data = torch.zeros(3, dtype=dtype)


def test_attributes_of_parameters_stay(runtime: tiermem.Runtime) -> None:
    """Models note on their parameters what optimizers have to know of them."""
    model = make()
    model[0].weight._no_weight_decay = True  # type: ignore[union-attr]
    model[2].bias.is_expert = 3  # type: ignore[union-attr]
    tiermem.shard(model, runtime)
    assert model[0].weight._no_weight_decay is True  # type: ignore[union-attr]
    assert model[2].bias.is_expert == 3  # type: ignore[union-attr]
    assert not hasattr(model[0].bias, "is_expert")
    with tiermem.gathered(model.parameters()):
        assert model[2].bias.is_expert == 3  # type: ignore[union-attr]


def test_what_is_frozen_or_unfrozen_inside(runtime: tiermem.Runtime) -> None:
    model = make()
    model[0].requires_grad_(False)
    tiermem.shard(model, runtime)
    optimizer = tiermem.optim.AdamW(model.parameters(), lr=0.1)
    with GatheredParameters([model[0].weight, model[2].weight], modifier_rank=0):
        model[0].weight.requires_grad_(True)
        model[2].weight.requires_grad_(False)
    assert model[0].weight.requires_grad
    assert not model[2].weight.requires_grad
    before = [tiermem.full_param(p) for p in (model[0].weight, model[2].weight)]
    x = torch.randn(2, 64, dtype=model[0].weight.dtype)
    model(x).float().sum().backward()
    optimizer.step()
    assert not torch.equal(before[0], tiermem.full_param(model[0].weight))
    assert torch.equal(before[1], tiermem.full_param(model[2].weight))


def test_gradients_that_are_set_inside(runtime: tiermem.Runtime) -> None:
    model = tiermem.shard(make(), runtime)
    optimizer = tiermem.optim.SGD(model.parameters(), lr=1.0)
    dtype = model[0].weight.dtype
    model(torch.ones(1, 64, dtype=dtype)).float().sum().backward()
    before = [tiermem.full_master(p) for p in model.parameters()]
    with tiermem.gathered(model.parameters()):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.25)
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(tiermem.full_master(param), old - 0.25)


@pytest.mark.parametrize("rank", [1, 5, -1, "0", True])
def test_a_rank_that_is_none_is_refused_alone_too(rank: object, runtime: tiermem.Runtime) -> None:
    model = tiermem.shard(make(), runtime)
    with pytest.raises(ConfigError, match="modifier_rank is"):  # noqa: SIM117
        with GatheredParameters(model.parameters(), modifier_rank=rank):  # type: ignore[arg-type]
            pass
