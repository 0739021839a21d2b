"""Parameter objects kept from before `shard` are named; those a module keeps of itself are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tiermem


def build() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])


class Collecting(nn.Module):
    """Uses weights of its children through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()
        self.collected = [layer.weight for layer in self.layers]


def test_a_list_in_another_module_is_named(make_runtime) -> None:
    with pytest.warns(UserWarning, match="elsewhere.*'layers.0.weight', 'layers.1.weight'"):
        tiermem.shard(Collecting(), make_runtime())


def test_an_optimizer_made_before_is_noticed(make_runtime) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="and 1 more. Remedy: take them from the model again"):
        tiermem.shard(model, make_runtime())
    del optimizer


@pytest.mark.parametrize(
    "model",
    [
        build,
        lambda: nn.LSTM(64, 64, 2),
        lambda: nn.Sequential(nn.GRU(64, 64)),
        lambda: nn.MultiheadAttention(64, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
    ],
)
def test_modules_that_keep_their_own_are_not(make_runtime, model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiermem.shard(model(), make_runtime())
