"""What cannot be sharded is refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Plain

import tiermem
from tiermem.errors import StateError


def _refused(model: nn.Module, runtime: tiermem.Runtime, message: str) -> None:
    before = dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(StateError, match=message):
        tiermem.shard(model, runtime)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert runtime.groups == []
    assert runtime.device_plan is None


@pytest.mark.parametrize("model", [None, "model", [nn.Linear(2, 2)], nn.Linear])
def test_what_is_no_module(make_runtime, model: Any) -> None:
    with pytest.raises(TypeError, match=type(model).__name__):
        tiermem.shard(model, make_runtime())


@pytest.mark.parametrize("runtime", [None, {"params": "host"}, "config.json"])
def test_what_is_no_runtime(runtime: Any) -> None:
    with pytest.raises(TypeError, match=type(runtime).__name__ + r".*tiermem\.Runtime"):
        tiermem.shard(Plain(), runtime)


def test_script_modules(make_runtime) -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    _refused(scripted, make_runtime(), "the model.*ScriptModule")
    _refused(nn.Sequential(nn.Linear(4, 4), scripted), make_runtime(), "'1' is a ScriptModule")


def test_parameters_made_under_inference_mode(make_runtime) -> None:
    with torch.inference_mode():
        inner = nn.Linear(4, 4)
    _refused(
        nn.Sequential(nn.Linear(4, 4), inner), make_runtime(), r"'1\.weight'.*inference_mode\(False\)"
    )


def test_a_meta_model_made_under_inference_mode_is_made_anew(make_runtime) -> None:
    with torch.inference_mode(), torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    tiermem.shard(model, make_runtime())
    optimizer = tiermem.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
