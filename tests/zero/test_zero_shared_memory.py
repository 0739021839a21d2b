"""Parameters over one storage: refused where they share elements, sharded where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Recurrent
from zero_twins import values

import tiermem
from tiermem.errors import StateError


class _Two(nn.Module):
    def __init__(self, tie: Any) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)
        self.b = nn.Linear(64, 64, bias=False)
        tie(self.a, self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def _by_data(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data)


def _transposed(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data.t())


def _row(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data[63:])


def _column(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data[:, 63:])


def _other_dtype(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.data.view(torch.bfloat16))


def _behind_a_column_between(a: nn.Linear, b: nn.Linear) -> None:
    """The next in memory has nothing in common with the first, the one after has."""
    whole = torch.randn(64, 64)
    a.weight = nn.Parameter(whole[:, :32])
    a.between = nn.Parameter(whole[:, 32:])
    b.weight = nn.Parameter(whole[10:12])


@pytest.mark.parametrize(
    "tie", [_by_data, _transposed, _row, _column, _other_dtype, _behind_a_column_between]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_parameters_over_the_same_memory(make_runtime, tie: Any, device: str) -> None:
    with torch.device(device):
        model = _Two(tie)
    before, runtime = list(model.parameters()), make_runtime()
    with pytest.raises(StateError, match=r"'[ab]\.\w+' and '[ab]\.\w+' are two.*Parameter object"):
        tiermem.shard(model, runtime)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert runtime.groups == []


def _halves(a: nn.Linear, b: nn.Linear) -> None:
    whole = torch.randn(128, 64)
    a.weight, b.weight = nn.Parameter(whole[:64]), nn.Parameter(whole[64:])


def _columns(a: nn.Linear, b: nn.Linear) -> None:
    whole = torch.randn(64, 128)
    a.weight, b.weight = nn.Parameter(whole[:, :64]), nn.Parameter(whole[:, 64:])


def _every_other_row(a: nn.Linear, b: nn.Linear) -> None:
    whole = torch.randn(128, 64)
    a.weight, b.weight = nn.Parameter(whole[::2]), nn.Parameter(whole[1::2])


def _tied(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = a.weight


@pytest.mark.parametrize("tie", [_halves, _columns, _every_other_row, _tied])
def test_parts_of_one_storage_are_sharded(make_runtime, tie: Any) -> None:
    model = _Two(tie)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    tiermem.shard(model, make_runtime())
    found = values(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_flattened_recurrent_weights_are_sharded(make_runtime) -> None:
    model = Recurrent()
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            flat = torch.cat([p.detach().flatten() for p in module.parameters(recurse=False)])
            start = 0
            for param in module.parameters(recurse=False):
                param.data = flat[start : start + param.numel()].view(param.shape)
                start += param.numel()
    tiermem.shard(model, make_runtime())
