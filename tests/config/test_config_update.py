"""Which update mode is in force, and what excludes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.config import load_config
from tiermem.errors import ConfigError, StateError

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "deferred"),
    ({"gradient_accumulation_steps": 1}, "deferred"),  # clipping was not declared
    ({"gradient_clipping": 0}, "deferred"),  # micro-steps were not
    ({"gradient_accumulation_steps": 1, "gradient_clipping": 0}, "backward"),
    ({"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}, "backward"),
    ({"gradient_accumulation_steps": 2, "gradient_clipping": 0}, "deferred"),
    ({"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}, "deferred"),
    ({"update": "deferred", "gradient_accumulation_steps": 1, "gradient_clipping": 0}, "deferred"),
    ({"update": "backward"}, "backward"),
    ({"update": "backward", "gradient_accumulation_steps": 1}, "backward"),
    ({"update": "backward", "gradient_clipping": 0}, "backward"),
    ({"update": "deferred"}, "deferred"),
]

CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"update": "backward", "gradient_clipping": 1.0}, "clip.*'deferred'"),
    ({"update": "backward", "gradient_accumulation_steps": 2}, "micro-step.*'deferred'"),
    ({"update": "backward", "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}, "'deferred'"),
]


@pytest.mark.parametrize(("config", "mode"), CASES)
def test_the_mode_in_force(config: dict[str, Any], mode: str) -> None:
    assert load_config(config).effective_update == mode
    with tiermem.Runtime(config | {"host_memory": "8MiB", "device": "cpu"}) as runtime:
        assert runtime.stats().update_mode == mode


@pytest.mark.parametrize(("config", "message"), CONFLICTS)
def test_what_excludes_update_in_backward(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def small(**changes: Any) -> tuple[tiermem.Runtime, nn.Module, tiermem.optim.AdamW]:
    runtime = tiermem.Runtime({"host_memory": "16MiB", "device": "cpu", **changes})
    model = tiermem.shard(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), runtime)
    return runtime, model, tiermem.optim.AdamW(model.parameters())


X = torch.ones(2, 64)


def test_deferred_takes_any_loop() -> None:
    runtime, model, optimizer = small()
    with runtime:
        loss = model(X).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.zero_grad()
        model(X).sum().backward()
        model(X).sum().backward()
        optimizer.step()
        optimizer.step()  # nothing to do
        optimizer.zero_grad()


def test_backward_refuses_clipping_and_names_the_mode_that_allows_it() -> None:
    runtime, model, optimizer = small(update="backward")
    with runtime:
        with pytest.raises(StateError, match=r"clip.*'deferred'"):
            optimizer.clip_grad_norm_(1.0)
        model(X).sum().backward()
        optimizer.step()


def test_backward_refuses_a_second_backward() -> None:
    runtime, model, _ = small(update="backward")
    with runtime:
        model(X).sum().backward()
        with pytest.raises(StateError, match=r"second backward.*'deferred'"):
            model(X).sum().backward()


def test_backward_refuses_retain_graph_before_anything_is_updated() -> None:
    runtime, model, optimizer = small(update="backward")
    with runtime:
        before = [tiermem.full_param(p) for p in model.parameters()]
        loss = model(X).sum()
        with pytest.raises(StateError, match=r"retain_graph.*'deferred'"):
            loss.backward(retain_graph=True)
        after = [tiermem.full_param(p) for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        model(X).sum().backward()
        optimizer.step()


def test_backward_refuses_zero_grad_without_step() -> None:
    runtime, model, optimizer = small(update="backward")
    with runtime:
        model(X).sum().backward()
        with pytest.raises(StateError, match=r"zero_grad.*without step.*'deferred'"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def test_backward_refuses_options_that_change_between_backward_and_step() -> None:
    runtime, model, optimizer = small(update="backward")
    with runtime:
        model(X).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(StateError, match=r"changed between backward and.*'deferred'"):
            optimizer.step()


def test_backward_takes_a_scheduler_after_step() -> None:
    runtime, model, optimizer = small(update="backward")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with runtime:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 8)
