"""Loss scaling: the rule for the scale, the unscaled update, and steps that are skipped."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics_rig import PLACEMENTS, batch, make_net, placed
from torch import nn

import tiermem
from tiermem.config import LossScaleConfig, load_config
from tiermem.errors import ConfigError, StateError
from tiermem.optim.scaling import LossScaler

HALF = {"compute_dtype": "fp16"}


def scales(options: dict[str, Any], overflows: str) -> list[float]:
    """The scale after each step; an ``x`` is an overflow."""
    scaler = LossScaler(LossScaleConfig(**options))
    result = []
    for each in overflows:
        scaler.stepped(overflow=each == "x")
        result.append(scaler.scale)
    return result


def test_starts_at_the_power_and_doubles_after_each_window() -> None:
    options = {"initial_scale_power": 3, "loss_scale_window": 2}
    assert scales(options, ".....") == [8, 16, 16, 32, 32]


def test_an_overflow_starts_the_window_anew() -> None:
    options = {"initial_scale_power": 3, "loss_scale_window": 3, "hysteresis": 1}
    assert scales(options, "..x...") == [8, 8, 4, 4, 4, 8]


def test_hysteresis_forgives_until_it_is_used_up_and_a_window_restores_it() -> None:
    options = {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 3}
    assert scales(options, "xxxx") == [64, 64, 32, 16]
    assert scales(options, "xx..xx") == [64, 64, 64, 128, 128, 128]
    assert scales(options, "xx.x") == [64, 64, 64, 32]


def test_never_below_the_minimum() -> None:
    options = {"initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1.5}
    assert scales(options, "xxx") == [2, 1.5, 1.5]


def test_a_fixed_scale_stays() -> None:
    assert scales({"loss_scale": 96.0, "loss_scale_window": 1, "hysteresis": 1}, ".x.") == [96.0] * 3


def test_gives_up_only_where_the_scale_cannot_be_lowered() -> None:
    options = LossScaleConfig(initial_scale_power=1, hysteresis=1, max_skipped_steps=2)
    scaler = LossScaler(options)
    assert [scaler.stepped(overflow=True) for _ in range(3)] == [False, False, True]
    scaler.stepped(overflow=False)
    assert not scaler.stepped(overflow=True)
    fixed = LossScaler(LossScaleConfig(loss_scale=8, max_skipped_steps=2))
    assert [fixed.stepped(overflow=True) for _ in range(2)] == [False, True]


def test_the_state_goes_on() -> None:
    options = LossScaleConfig(initial_scale_power=3, loss_scale_window=3, hysteresis=2)
    first, second = LossScaler(options), LossScaler(options)
    for each in "..x.":
        first.stepped(overflow=each == "x")
    second.load_state_dict(first.state_dict())
    for each in "..xx...":
        assert first.stepped(overflow=each == "x") == second.stepped(overflow=each == "x")
        assert first.state_dict() == second.state_dict()
    with pytest.raises(StateError, match="lacks good_steps"):
        second.load_state_dict({k: v for k, v in first.state_dict().items() if k != "good_steps"})


# ---- configuration

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"compute_dtype": "fp16", "update": "backward"}, "cannot scale losses.*'deferred'"),
    ({"fp16": {}, "update": "backward"}, "cannot scale losses.*'deferred'"),
    ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale"),
    ({"fp16": {"loss_scale": math.inf}}, "fp16.loss_scale"),
    ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis"),
    ({"fp16": {"loss_scale_windows": 3}}, "did you mean 'loss_scale_window'"),
    ({"fp16": {"initial_scale_power": 2, "min_loss_scale": 5}}, "starts at 4, below min_loss_scale 5"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_cannot_work_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def test_fp16_updates_are_always_deferred() -> None:
    declared = {"gradient_accumulation_steps": 1, "gradient_clipping": 0}
    assert load_config(declared).effective_update == "backward"
    assert load_config({**declared, **HALF}).effective_update == "deferred"
    assert load_config({**declared, "fp16": {}}).effective_update == "deferred"


def test_fp16_parameters_of_a_model_refuse_updates_in_backward(tmp_path: Path) -> None:
    with tiermem.Runtime({**placed("host", tmp_path), "update": "backward"}) as runtime:
        model = tiermem.shard(make_net().half(), runtime)
        with pytest.raises(ConfigError, match=r"fp16 parameters need loss scaling.*'deferred'"):
            tiermem.optim.AdamW(model.parameters())


# ---- training


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    result: torch.Tensor = model(batch(step, dtype)).float().square().mean()
    return result


def contents(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    result = []
    for p in model.parameters():
        result += [
            tiermem.full_param(p),
            *(optimizer.state[p].values() if p in optimizer.state else ()),
        ]
    return result


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fp32_gradients_are_unscaled_exactly(placement: str, tmp_path: Path) -> None:
    """A power of two changes no bit of an fp32 gradient: scaled or not is the same training."""
    results = []
    for fp16 in (None, {"loss_scale": 1024.0}, {"initial_scale_power": 8}):
        config = {**placed(placement, tmp_path), "fp16": fp16}
        with tiermem.Runtime(config) as runtime:
            model = tiermem.shard(make_net(), runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            norms = []
            for step in range(3):
                optimizer.scale(loss_of(model, step, torch.float32)).backward()
                norms.append(optimizer.clip_grad_norm_(0.1).item())
                optimizer.step()
                optimizer.zero_grad()
            results.append((contents(model, optimizer), norms))
    for values, norms in results[1:]:
        assert_same(values, results[0][0])
        assert norms == results[0][1]


def test_small_gradients_survive_only_with_a_scale(tmp_path: Path) -> None:
    """A gradient of 1e-9 is zero in fp16; 2**16 times it is not."""
    moved = {}
    for scale in (1.0, 65536.0):
        with tiermem.Runtime(
            {**placed("host", tmp_path), **HALF, "fp16": {"loss_scale": scale}}
        ) as runtime:
            model = tiermem.shard(make_net(), runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
            before = tiermem.full_master(model[0].weight)
            optimizer.scale(loss_of(model, 0) * 1e-7).backward()
            optimizer.step()
            moved[scale] = (tiermem.full_master(model[0].weight) != before).float().mean().item()
    assert moved[1.0] < 0.2
    assert moved[65536.0] > 0.8


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_changes_nothing_but_the_scale(
    placement: str, clip: float | None, tmp_path: Path
) -> None:
    config = {**placed(placement, tmp_path), **HALF, "fp16": {"hysteresis": 1}}
    results = []
    for bad in (None, 2):
        with tiermem.Runtime(config) as runtime:
            model = tiermem.shard(make_net(), runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(4):
                for again in (True, False) if step == bad else (False,):
                    if again:  # a batch that overflows, before the good one
                        before = contents(model, optimizer)
                        scale = optimizer.loss_scale
                        optimizer.scale(loss_of(model, step) * 1e6).backward()
                    else:
                        optimizer.scale(loss_of(model, step)).backward()
                    if clip is not None:
                        assert optimizer.clip_grad_norm_(clip).isfinite() != again
                    optimizer.step()
                    assert optimizer.overflow is again
                    if again:
                        assert_same(contents(model, optimizer), before)
                        assert model[0].weight.grad is None
                        assert optimizer.loss_scale == scale / 2
                    else:
                        scheduler.step()
                    optimizer.zero_grad()
            assert optimizer.skipped_steps == (0 if bad is None else 1)
            assert runtime.stats().skipped_steps == optimizer.skipped_steps
            assert runtime.stats().loss_scale == optimizer.loss_scale
            steps = {int(optimizer.state[p]["step"]) for p in model.parameters()}
            assert steps == {4}
            results.append(contents(model, optimizer))
    # The scale was 65536 and 32768: exact powers, unless a gradient was below fp16's normal numbers.
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=2e-2, atol=2e-2)


def test_many_overflows_in_a_row_name_the_tensors(tmp_path: Path) -> None:
    fp16 = {"initial_scale_power": 1, "hysteresis": 1, "max_skipped_steps": 3}
    config = {**placed("host", tmp_path), **HALF, "fp16": fp16}
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(make_net(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)

        def bad_step() -> None:
            loss = optimizer.scale(loss_of(model, 0))
            (loss + model[2].bias.float().sum() * math.inf).backward()
            optimizer.step()

        before = contents(model, optimizer)
        for _ in range(3):
            bad_step()
        with pytest.raises(StateError, match=r"loss scale 1, .*3 steps.*those of 2\.bias\. Remedy"):
            bad_step()
        assert_same(contents(model, optimizer), before)
        optimizer.scale(loss_of(model, 0)).backward()  # and it can go on
        optimizer.step()
        assert not optimizer.overflow


def test_a_step_whose_loss_was_not_scaled_is_refused(tmp_path: Path) -> None:
    with tiermem.Runtime({**placed("host", tmp_path), **HALF}) as runtime:
        model = tiermem.shard(make_net(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        optimizer.step()  # nothing to do
        loss_of(model, 0).backward()
        with pytest.raises(StateError, match=r"no loss was scaled.*optimizer\.scale\(loss\)"):
            optimizer.step()
        optimizer.zero_grad()
        loss = optimizer.scale(loss_of(model, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_state_dict_holds_the_scale(tmp_path: Path) -> None:
    config = {**placed("host", tmp_path), **HALF, "fp16": {"hysteresis": 1}}
    saved: Any = None
    for _ in range(2):
        with tiermem.Runtime(config) as runtime:
            model = tiermem.shard(make_net(), runtime)
            optimizer = tiermem.optim.AdamW(model.parameters())
            if saved is not None:
                optimizer.load_state_dict(saved)
                assert (optimizer.loss_scale, optimizer.skipped_steps) == (32768, 1)
            optimizer.scale(loss_of(model, 0) * 1e6).backward()
            optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
    assert saved["loss_scale"]["scale"] == 16384
    with tiermem.Runtime(placed("host", tmp_path)) as runtime:  # fp32: no scale, and none is kept
        model = tiermem.shard(make_net(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        assert "loss_scale" not in optimizer.state_dict()
        assert optimizer.scale(torch.ones(())) == 1
        optimizer.load_state_dict(saved)


def test_both_norms_can_be_read(tmp_path: Path) -> None:
    theirs = make_net()
    with tiermem.Runtime(placed("host", tmp_path)) as runtime:
        model = tiermem.shard(make_net(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        assert optimizer.last_grad_norm is None
        assert runtime.stats().grad_norm is None
        for max_norm in (0.5, 1e9):
            loss_of(model, 0, torch.float32).backward()
            theirs.zero_grad()
            theirs(batch(0)).square().mean().backward()
            before = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm).item()
            after = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()]).item()
            assert optimizer.clip_grad_norm_(max_norm).item() == pytest.approx(before, rel=1e-6)
            assert optimizer.last_grad_norm == pytest.approx(before, rel=1e-6)
            assert optimizer.last_clipped_norm == pytest.approx(after, rel=1e-6)
            assert runtime.stats().grad_norm == optimizer.last_grad_norm
            assert runtime.stats().clipped_grad_norm == optimizer.last_clipped_norm
            optimizer.zero_grad()


def test_torchs_own_scaler_names_ours(tmp_path: Path) -> None:
    with tiermem.Runtime(placed("host", tmp_path)) as runtime:
        model = tiermem.shard(make_net(), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, 0, torch.float32)).backward()
        with pytest.raises(StateError, match=r"opt\.scale\(loss\), not GradScaler"):
            scaler.step(optimizer)
