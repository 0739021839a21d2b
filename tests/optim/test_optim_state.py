"""Optimizer states are read when they are looked at, as they are then, and can be loaded."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_rig import PLACEMENTS, assert_equal_to, make_net, sharded, take_step

import tiermem
from tiermem.errors import StateError

KEYS = ("exp_avg", "exp_avg_sq")


def trained_pair(model: Any, steps: int = 3) -> tuple[Any, Any, tiermem.optim.AdamW]:
    """A twin in torch and an optimizer of ``model``, both stepped."""
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        take_step(theirs, their, step)
        take_step(model, optimizer, step)
    return theirs, their, optimizer


def assert_states_equal(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> None:
    assert set(ours) == set(theirs)
    for key, state in theirs.items():
        assert int(ours[key]["step"]) == int(state["step"])
        for name in KEYS:
            assert torch.equal(ours[key][name], state[name])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_state_dict_equals_torch(placement: str, tmp_path: Path) -> None:
    with sharded(tmp_path, placement) as (_, model):
        _, their, optimizer = trained_pair(model)
        ours, theirs = optimizer.state_dict(), their.state_dict()
        assert_states_equal(ours["state"], theirs["state"])
        (mine,), (expected,) = ours["param_groups"], theirs["param_groups"]
        for key in ("lr", "betas", "eps", "weight_decay", "maximize", "params"):
            assert mine[key] == expected[key]


def test_state_dict_reads_nothing_until_it_is_looked_at(tmp_path: Path) -> None:
    with sharded(tmp_path, "nvme") as (runtime, model):
        _, _, optimizer = trained_pair(model)
        runtime.drain()
        before = runtime.stats()
        states = optimizer.state_dict()["state"]
        assert len(states) == 6
        assert list(states) == list(range(6))
        assert set(states[0]) == {"step", *KEYS}
        assert 17 not in states
        repr(states[0])
        assert int(states[0]["step"]) == 3
        assert runtime.stats().read_bytes == before.read_bytes
        states[0]["exp_avg"]
        read = runtime.stats().read_bytes - before.read_bytes
        assert 0 < read <= model.first.weight.numel() * 4 + 2 * 4096
        assert runtime.stats().host.used == before.host.used


def test_state_dict_does_not_even_apply_what_is_pending(tmp_path: Path) -> None:
    with sharded(tmp_path, "nvme", prefetch_bytes=0) as (runtime, model):
        _, _, optimizer = trained_pair(model)
        before = runtime.stats().read_bytes
        optimizer.state_dict()
        assert runtime.stats().read_bytes == before


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_opt_state_applies_what_is_pending_first(placement: str, tmp_path: Path) -> None:
    with sharded(tmp_path, placement) as (_, model):
        theirs, their, optimizer = trained_pair(model)
        names = dict(theirs.named_parameters())
        for name, param in model.named_parameters():
            for key in KEYS:
                assert torch.equal(optimizer.state[param][key], their.state[names[name]][key])


def test_opt_state_is_a_mapping_by_parameter(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        params = list(model.parameters())
        assert len(optimizer.state) == 0
        assert params[0] not in optimizer.state
        with pytest.raises(KeyError):
            optimizer.state[params[0]]
        take_step(model, optimizer, 0)
        assert len(optimizer.state) == 6
        assert [id(key) for key in optimizer.state] == [id(param) for param in params]
        assert params[3] in optimizer.state
        assert optimizer.state.get(torch.ones(1)) is None


def test_values_are_copies_of_the_moment(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        _, _, optimizer = trained_pair(model)
        param = next(model.parameters())
        first = optimizer.state[param]["exp_avg"]
        kept = first.clone()
        take_step(model, optimizer, 7)
        second = optimizer.state[param]["exp_avg"]
        assert torch.equal(first, kept)
        assert not torch.equal(first, second)
        second.zero_()
        assert not torch.equal(optimizer.state[param]["exp_avg"], second)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_save_holds_everything(weights_only: bool, placement: str, tmp_path: Path) -> None:
    with sharded(tmp_path, placement) as (_, model):
        _, their, optimizer = trained_pair(model)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
    assert type(loaded["state"]) is OrderedDict  # readable without this library
    assert_states_equal(loaded["state"], their.state_dict()["state"])


def test_pickle_and_deepcopy_hold_everything(tmp_path: Path) -> None:
    with sharded(tmp_path, "nvme") as (_, model):
        _, their, optimizer = trained_pair(model)
        copies = [
            pickle.loads(pickle.dumps(optimizer.state_dict())),
            copy.deepcopy(optimizer.state_dict()),
        ]
        take_step(model, optimizer, 9)
    for copied in copies:
        assert_states_equal(copied["state"], their.state_dict()["state"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_saved_run_goes_on_with_the_same_bits(placement: str, dtype: str, tmp_path: Path) -> None:
    """Model and optimizer through torch.save into a new runtime."""
    (tmp_path / "drive").mkdir()
    file = tmp_path / "saved.pt"
    with sharded(tmp_path / "drive", placement, compute_dtype=dtype) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            take_step(model, optimizer, step)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        expected = [take_step(model, optimizer, step) for step in range(3, 6)]
        masters = [tiermem.full_master(p) for p in model.parameters()]
    saved = torch.load(file, weights_only=True)
    with sharded(tmp_path / "drive", placement, compute_dtype=dtype) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=0.5)
        take_step(model, optimizer, 50)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert [take_step(model, optimizer, step) for step in range(3, 6)] == expected
        for param, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(tiermem.full_master(param), master)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_state_of_torch_adamw_is_taken(placement: str, tmp_path: Path) -> None:
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.3, fused=True)
    for step in range(3):
        take_step(theirs, their, step)
    with sharded(tmp_path, placement) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters())
        ours.load_state_dict(theirs.state_dict())
        optimizer.load_state_dict(their.state_dict())
        assert optimizer.param_groups[0]["weight_decay"] == 0.3
        for step in range(3, 6):
            assert take_step(ours, optimizer, step) == take_step(theirs, their, step)
        assert_equal_to(ours, theirs)


def test_our_state_goes_into_torch_adamw(tmp_path: Path) -> None:
    with sharded(tmp_path, "nvme") as (_, model):
        theirs, _, optimizer = trained_pair(model)
        fresh = torch.optim.AdamW(theirs.parameters(), fused=True)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file))
        fresh.param_groups[0]["fused"] = True  # torch's own option, which a loaded group replaces
        for step in range(3, 6):
            assert take_step(theirs, fresh, step) == take_step(model, optimizer, step)


def test_loading_discards_what_was_pending_in_favour_of_what_is_loaded(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        _, _, optimizer = trained_pair(model)
        saved = copy.deepcopy(optimizer.state_dict())
        params = {k: v.clone() for k, v in model.state_dict().items()}
        expected = [take_step(model, optimizer, step) for step in (3, 4)]
        model.load_state_dict(params)
        optimizer.load_state_dict(saved)
        assert [take_step(model, optimizer, step) for step in (3, 4)] == expected


def test_loading_a_state_keeps_the_loaded_groups_from_later_changes(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        _, _, optimizer = trained_pair(model)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = 7.0
        assert saved["param_groups"][0]["lr"] == 1e-2


def test_an_empty_state_starts_anew(tmp_path: Path) -> None:
    """As in torch: what the loaded state does not hold has no state afterwards."""
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    with sharded(tmp_path) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2)
        empty = [copy.deepcopy(o.state_dict()) for o in (their, optimizer)]
        take_step(theirs, their, 0)
        take_step(ours, optimizer, 0)
        their.load_state_dict(empty[0])
        optimizer.load_state_dict(empty[1])
        assert len(optimizer.state) == 0
        take_step(theirs, their, 1)
        take_step(ours, optimizer, 1)
        assert_equal_to(ours, theirs)


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        _, _, optimizer = trained_pair(model)
        state = copy.deepcopy(optimizer.state_dict())
        fewer = copy.deepcopy(state)
        fewer["param_groups"][0]["params"] = fewer["param_groups"][0]["params"][:-1]
        with pytest.raises((StateError, ValueError), match="group"):
            optimizer.load_state_dict(fewer)
        wrong = copy.deepcopy(state)
        wrong["state"][0]["exp_avg"] = torch.ones(3, 3)
        with pytest.raises((StateError, ValueError), match=r"first\.weight.*\(3, 3\)|\(3, 3\)"):
            optimizer.load_state_dict(wrong)
        missing = copy.deepcopy(state)
        del missing["state"][1]["exp_avg_sq"]
        with pytest.raises((StateError, ValueError), match="exp_avg_sq"):
            optimizer.load_state_dict(missing)
        with pytest.raises((StateError, ValueError)):
            optimizer.load_state_dict({"state": {}})


def test_a_refused_state_changes_nothing(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        theirs, their, optimizer = trained_pair(model)
        wrong = copy.deepcopy(optimizer.state_dict())
        wrong["state"][0]["exp_avg"].zero_()
        wrong["state"][5]["exp_avg"] = torch.ones(3, 3)
        wrong["param_groups"][0]["lr"] = 9.0
        with pytest.raises((StateError, ValueError)):
            optimizer.load_state_dict(wrong)
        assert take_step(model, optimizer, 3) == take_step(theirs, their, 3)
        assert_equal_to(model, theirs)


def test_state_of_a_bf16_parameter_has_its_master(tmp_path: Path) -> None:
    with sharded(tmp_path, "nvme", compute_dtype="bf16") as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        take_step(model, optimizer, 0)
        for param in model.parameters():
            state = optimizer.state[param]
            assert set(state) == {"step", *KEYS, "master"}
            assert all(state[key].dtype == torch.float32 for key in (*KEYS, "master"))
            assert torch.equal(state["master"], tiermem.full_master(param))
            assert state["master"].shape == param.shape


def test_states_look_the_same_after_close_or_say_that_it_is_closed(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        _, _, optimizer = trained_pair(model)
        states = optimizer.state_dict()["state"]
    with pytest.raises(StateError, match="closed"):
        states[0]["exp_avg"]
    with pytest.raises(StateError, match="closed"):
        optimizer.step()
