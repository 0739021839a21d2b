"""Hooks registered on the optimizer are called as torch calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optim_rig import make_net, sharded, take_step

import tiermem
from tiermem.errors import ConfigError


def _register(optimizer: torch.optim.Optimizer, log: list[Any]) -> None:
    """Every kind, twice; those that may replace what they are given do."""

    def note(name: str) -> Any:
        return lambda given, *rest: log.append((name, given is optimizer, len(rest)))

    def replace(name: str) -> Any:
        def hook(given: Any, state: dict[str, Any]) -> dict[str, Any]:
            log.append((name, given is optimizer, sorted(state)))
            return {**state, name: len(state)}

        return hook

    optimizer.register_state_dict_pre_hook(note("before save"))
    optimizer.register_state_dict_post_hook(note("after save"))
    optimizer.register_state_dict_post_hook(replace("after save, replacing"))
    optimizer.register_load_state_dict_pre_hook(note("before load"))
    optimizer.register_load_state_dict_pre_hook(replace("before load, replacing"), prepend=True)
    optimizer.register_load_state_dict_post_hook(note("after load"))
    optimizer.register_step_pre_hook(note("before step"))
    optimizer.register_step_post_hook(note("after step"))


def test_hooks_are_called_as_torch_calls_them(tmp_path: Path) -> None:
    theirs, their_log = make_net(), []
    our_log: list[Any] = []
    with sharded(tmp_path) as (_, ours):
        for model, make, log in (
            (theirs, torch.optim.AdamW, their_log),
            (ours, tiermem.optim.AdamW, our_log),
        ):
            optimizer = make(model.parameters())
            _register(optimizer, log)
            take_step(model, optimizer, 0)
            state = optimizer.state_dict()
            assert "after save, replacing" in state
            optimizer.load_state_dict(state)
            assert "before load, replacing" not in state
            take_step(model, optimizer, 1)
    assert our_log == their_log
    assert len(our_log) == 10


def test_what_a_hook_changes_is_what_is_loaded(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-3)
        take_step(model, optimizer, 0)

        def halve(_: Any, state: dict[str, Any]) -> None:
            state["param_groups"] = [{**group, "lr": 5e-4} for group in state["param_groups"]]

        handle = optimizer.register_load_state_dict_pre_hook(halve)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 5e-4
        assert state["param_groups"][0]["lr"] == 1e-3
        handle.remove()
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 1e-3


def test_nothing_is_called_after_a_load_that_was_refused(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        called: list[Any] = []
        optimizer.register_load_state_dict_post_hook(called.append)
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = -1
        with pytest.raises(ConfigError, match="lr"):
            optimizer.load_state_dict(state)
        assert called == []
