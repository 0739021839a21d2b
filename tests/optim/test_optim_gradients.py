"""Which gradients a step uses: parameters without one are skipped, clipping agrees with torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_rig import PLACEMENTS, assert_equal_to, loss_of, make_net, sharded, take_step

import tiermem
from tiermem.errors import ConfigError, StateError, TierMemError

MODES = ("deferred", "backward")


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parameters_without_gradients_are_skipped_and_count_their_own_steps(
    placement: str, update: str, tmp_path: Path
) -> None:
    uses = [True, False, False, True, False, True]
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.3, fused=True)
    with sharded(tmp_path, placement, update=update) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.3)
        for step, branch in enumerate(uses):
            expected = take_step(theirs, their, step, branch=branch)
            assert take_step(ours, optimizer, step, branch=branch) == expected
        assert_equal_to(ours, theirs)
        for name, param in ours.named_parameters():
            steps = int(optimizer.state[param]["step"])
            assert steps == (sum(uses) if name.startswith("branch") else len(uses))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_parameter_never_used_has_no_state(placement: str, tmp_path: Path) -> None:
    with sharded(tmp_path, placement) as (_, model):
        before = tiermem.full_param(model.branch.weight)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            take_step(model, optimizer, step, branch=False)
        assert model.branch.weight not in optimizer.state
        assert len(optimizer.state) == 4
        assert sorted(optimizer.state_dict()["state"]) == [0, 1, 2, 3]
        assert torch.equal(tiermem.full_param(model.branch.weight), before)


@pytest.mark.parametrize("update", MODES)
def test_step_without_gradients_does_nothing(update: str, tmp_path: Path) -> None:
    with sharded(tmp_path, update=update) as (_, model):
        before = [tiermem.full_param(p) for p in model.parameters()]
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(tiermem.full_param(param), value)
        assert len(optimizer.state) == 0


def test_setting_grad_to_none_skips_a_parameter(tmp_path: Path) -> None:
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    with sharded(tmp_path) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2)
        for step in range(3):
            for model, opt in ((theirs, their), (ours, optimizer)):
                loss_of(model, step).backward()
                if step == 1:
                    model.second.weight.grad = None
                opt.step()
                opt.zero_grad()
        assert_equal_to(ours, theirs)
        assert int(optimizer.state[ours.second.weight]["step"]) == 2


def test_setting_grad_to_a_tensor_uses_it(tmp_path: Path) -> None:
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    gradient = torch.randn(256, 64, generator=torch.Generator().manual_seed(3))
    with sharded(tmp_path, "nvme") as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2)
        for model, opt in ((theirs, their), (ours, optimizer)):
            loss_of(model, 0).backward()
            model.first.weight.grad = gradient.clone()
            opt.step()
            opt.zero_grad()
        assert_equal_to(ours, theirs)
        with pytest.raises((TierMemError, RuntimeError), match=r"shape|size"):
            ours.first.weight.grad = torch.ones(3)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_module_and_of_the_optimizer(set_to_none: bool, tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        before = [tiermem.full_param(p) for p in model.parameters()]
        for forget in (optimizer.zero_grad, model.zero_grad):
            loss_of(model, 0).backward()
            assert model.first.weight.grad is not None
            forget(set_to_none=set_to_none)
            assert model.first.weight.grad is None or not set_to_none
        if set_to_none:
            optimizer.step()
            for param, value in zip(model.parameters(), before, strict=True):
                assert torch.equal(tiermem.full_param(param), value)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("max_norm", [1e-4, 0.1, 1.0, 1e9, 0.0])
def test_clip_grad_norm_returns_and_applies_what_torch_does(
    max_norm: float, placement: str, tmp_path: Path
) -> None:
    """torch sums in fp32: relative 1e-5. AdamW's first step is all but invariant to the scale, so a
    large eps makes the scale show."""
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), fused=True, **options)
    with sharded(tmp_path, placement) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), **options)
        for step in range(3):
            loss_of(theirs, step).backward()
            expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
            their.step()
            their.zero_grad()
            loss_of(ours, step).backward()
            got = optimizer.clip_grad_norm_(max_norm)
            assert got.shape == ()
            assert float(got) == pytest.approx(float(expected), rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
        expected_params = dict(theirs.named_parameters())
        for name, param in ours.named_parameters():
            torch.testing.assert_close(
                tiermem.full_param(param), expected_params[name].detach(), rtol=1e-5, atol=1e-6
            )


def test_the_norm_is_that_of_the_accumulated_gradients(tmp_path: Path) -> None:
    theirs = make_net()
    with sharded(tmp_path, "nvme") as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters())
        for step in range(3):
            loss_of(theirs, step).backward()
            loss_of(ours, step).backward()
            exact = math.sqrt(
                sum(
                    float(p.grad.double().square().sum())
                    for p in theirs.parameters()
                    if p.grad is not None
                )
            )
            assert optimizer.grad_norm() == pytest.approx(exact, rel=1e-6)
            assert float(optimizer.clip_grad_norm_(1e9)) == pytest.approx(exact, rel=1e-6)


def test_clipping_counts_for_one_step_only(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}
    with sharded(tmp_path) as (_, model), sharded(tmp_path) as (_, other):
        clipped = tiermem.optim.AdamW(model.parameters(), **options)
        plain = tiermem.optim.AdamW(other.parameters(), **options)
        loss_of(model, 0).backward()
        clipped.clip_grad_norm_(1e-6)
        clipped.zero_grad()  # the factor goes with the gradients
        take_step(model, clipped, 1)
        take_step(other, plain, 1)
        assert torch.equal(
            tiermem.full_param(model.first.weight), tiermem.full_param(other.first.weight)
        )


def test_clipping_twice_clips_what_the_first_has_left(tmp_path: Path) -> None:
    """In torch the second call sees scaled gradients."""
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), fused=True, **options)
    loss_of(theirs, 0).backward()
    norms = [float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), n)) for n in (0.01, 1.0)]
    their.step()
    with sharded(tmp_path) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), **options)
        loss_of(ours, 0).backward()
        got = [float(optimizer.clip_grad_norm_(n)) for n in (0.01, 1.0)]
        optimizer.step()
        assert got == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(
            tiermem.full_param(ours.first.weight), theirs.first.weight.detach(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite(value: float, tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        loss_of(model, 0).backward()
        model.first.bias.grad = torch.full((256,), value)
        with pytest.raises((StateError, RuntimeError), match=r"nan|inf"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert not math.isfinite(float(optimizer.clip_grad_norm_(1.0)))
        optimizer.zero_grad()
        take_step(model, optimizer, 1)
        assert torch.isfinite(tiermem.full_param(model.first.weight)).all()


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_wrong_max_norm_is_refused(max_norm: float, tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        loss_of(model, 0).backward()
        with pytest.raises(ConfigError, match="max_norm"):
            optimizer.clip_grad_norm_(max_norm)


def test_clipping_without_gradients_gives_zero(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        assert float(optimizer.clip_grad_norm_(1.0)) == 0.0
        optimizer.step()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_torch_clipping_of_gradients_that_have_left_raises_the_remedy(
    placement: str, tmp_path: Path
) -> None:
    with sharded(tmp_path, placement) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        loss_of(model, 0).backward()
        with pytest.raises(StateError, match="clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(StateError):
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()


def test_parameters_frozen_between_backward_and_step(tmp_path: Path) -> None:
    """torch updates a parameter that has a gradient, whatever requires_grad says now."""
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    with sharded(tmp_path) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2)
        for step in range(3):
            for model, opt in ((theirs, their), (ours, optimizer)):
                loss_of(model, step).backward()
                model.second.weight.requires_grad_(step != 1)
                opt.step()
                opt.zero_grad()
                model.second.weight.requires_grad_(True)
        assert_equal_to(ours, theirs)


def test_the_optimizer_may_be_made_after_the_first_backward(tmp_path: Path) -> None:
    theirs = make_net()
    loss_of(theirs, 0).backward()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    their.step()
    with sharded(tmp_path) as (_, ours):
        try:
            loss_of(ours, 0).backward()
        except StateError as error:
            assert "optimizer" in str(error)  # or it says so
            return
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2)
        optimizer.step()
        assert_equal_to(ours, theirs)


def test_a_skipped_step_leaves_no_clipping_behind(tmp_path: Path) -> None:
    """The loop that forgets the gradients of a step whose norm is not finite, by the model's
    ``zero_grad``."""
    with sharded(tmp_path, compute_dtype="fp32") as (_, model):
        plain = make_net()
        pairs = [
            (model, tiermem.optim.AdamW(model.parameters(), lr=1e-2)),
            (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)),
        ]
        losses: list[list[float]] = [[], []]
        for step in range(5):
            for kept, (net, optimizer) in zip(losses, pairs, strict=True):
                loss = loss_of(net, step) * (float("inf") if step == 1 else 1.0)
                loss.backward()
                if hasattr(optimizer, "clip_grad_norm_"):
                    norm = optimizer.clip_grad_norm_(1e3)
                else:
                    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3)
                if torch.isfinite(norm):
                    optimizer.step()
                    kept.append(float(loss.detach()))
                net.zero_grad()
        assert losses[0] == losses[1]
        assert len(losses[0]) == 4


def test_what_is_added_after_clipping_is_not_clipped(tmp_path: Path) -> None:
    with sharded(tmp_path, compute_dtype="fp32") as (_, model):
        plain = make_net()
        optimizer = tiermem.optim.AdamW(model.parameters())
        for net in (model, plain):
            loss_of(net, 0).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert optimizer.clip_grad_norm_(0.01).item() == pytest.approx(expected.item(), rel=1e-5)
        for param, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(tiermem.full_grad(param), theirs.grad)
        for net in (model, plain):
            loss_of(net, 1).backward()
        for param, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(tiermem.full_grad(param), theirs.grad)
        total = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert optimizer.grad_norm() == pytest.approx(total.item(), rel=1e-5)


def test_a_stand_in_is_no_gradient_to_assign(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        loss_of(model, 0).backward()
        first, second = model.first.weight, model.second.weight
        stand_in = first.grad
        first.grad = stand_in  # what it is already
        assert tiermem.full_grad(first) is not None
        with pytest.raises(StateError, match="full_grad"):
            second.grad = stand_in
        first.grad = None
        with pytest.raises(StateError, match="full_grad"):
            first.grad = stand_in
        before = tiermem.full_param(first)
        optimizer.step()
        assert torch.equal(tiermem.full_param(first), before)


def test_the_norm_is_of_the_optimizers_own_parameters(tmp_path: Path) -> None:
    """Others of the same unit may have gradients too."""
    with sharded(tmp_path, compute_dtype="fp32") as (_, model):
        plain = make_net()
        optimizer = tiermem.optim.AdamW([model.first.weight, model.second.weight])
        for net in (model, plain):
            loss_of(net, 0).backward()
        own = [plain.first.weight.grad, plain.second.weight.grad]
        expected = torch.nn.utils.get_total_norm([g for g in own if g is not None])
        assert optimizer.grad_norm() == pytest.approx(expected.item(), rel=1e-5)
