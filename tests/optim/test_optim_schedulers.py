"""torch's learning-rate schedulers work unchanged, and give torch's bits."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_rig import PLACEMENTS, assert_equal_to, make_net, sharded, take_step
from torch.optim import lr_scheduler

import tiermem

Make = Callable[[Any], Any]

SCHEDULERS: dict[str, Make] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "cosine-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 2, cycle_momentum=True),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def run(model: Any, optimizer: Any, make: Make, steps: int = 6) -> tuple[list[float], list[float]]:
    scheduler = make(optimizer)
    losses, rates = [], []
    for step in range(steps):
        losses.append(take_step(model, optimizer, step))
        scheduler.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return losses, rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_gives_the_bits_it_gives_in_torch(name: str, tmp_path: Path) -> None:
    theirs = make_net()
    expected = run(
        theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True), SCHEDULERS[name]
    )
    placement = PLACEMENTS[list(SCHEDULERS).index(name) % 3]
    with sharded(tmp_path, placement) as (_, ours):
        got = run(ours, tiermem.optim.AdamW(ours.parameters(), lr=1e-2), SCHEDULERS[name])
        assert got == expected
        assert_equal_to(ours, theirs)


def test_reduce_on_plateau(tmp_path: Path) -> None:
    def losses_of(model: Any, optimizer: Any) -> list[float]:
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        result = []
        for step in range(5):
            result.append(take_step(model, optimizer, step))
            scheduler.step(1.0)
        return [*result, float(optimizer.param_groups[0]["lr"])]

    theirs = make_net()
    expected = losses_of(theirs, torch.optim.AdamW(theirs.parameters(), fused=True))
    with sharded(tmp_path) as (_, ours):
        assert losses_of(ours, tiermem.optim.AdamW(ours.parameters())) == expected
    assert expected[-1] < 1e-3


def test_schedulers_do_not_warn_about_their_order(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with sharded(tmp_path) as (_, model):
        run(model, tiermem.optim.AdamW(model.parameters()), SCHEDULERS["step"])
    assert [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)] == []


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_pending_uses_the_rate_of_its_step(placement: str, tmp_path: Path) -> None:
    """step(); zero_grad(); scheduler.step(), then reading with no further forward."""
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    take_step(theirs, their, 0)
    with sharded(tmp_path, placement) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=1e-2)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.0)
        take_step(ours, optimizer, 0)
        scheduler.step()
        optimizer.param_groups[0].update(weight_decay=9.0, betas=(0.1, 0.1), eps=1.0)
        assert_equal_to(ours, theirs)


def test_a_tensor_learning_rate_may_change_in_place_after_step(tmp_path: Path) -> None:
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=torch.tensor(1e-2), fused=True)
    with sharded(tmp_path) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters(), lr=torch.tensor(1e-2))
        for step in range(3):
            for model, opt in ((theirs, their), (ours, optimizer)):
                take_step(model, opt, step)
                opt.param_groups[0]["lr"].mul_(0.25)
        assert_equal_to(ours, theirs)


def test_a_schedule_resumes_from_its_state_dict(tmp_path: Path) -> None:
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(3):
            take_step(model, optimizer, step)
            scheduler.step()
        saved = pickle.loads(pickle.dumps(scheduler.state_dict()))
        fresh = lr_scheduler.CosineAnnealingLR(optimizer, 10)
        fresh.load_state_dict(saved)
        assert fresh.last_epoch == 3
        assert math.isclose(fresh.get_last_lr()[0], scheduler.get_last_lr()[0])


def test_groups_keep_their_own_rates(tmp_path: Path) -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(model.first.parameters()), "lr": 1e-2},
            {"params": [*model.second.parameters(), *model.branch.parameters()], "lr": 1e-3},
        ]

    theirs = make_net()
    expected = run(theirs, torch.optim.AdamW(groups(theirs), fused=True), SCHEDULERS["exponential"])
    with sharded(tmp_path) as (_, ours):
        got = run(ours, tiermem.optim.AdamW(groups(ours)), SCHEDULERS["exponential"])
        assert got == expected
        assert_equal_to(ours, theirs)


def test_step_hooks_of_torch_optimizers_run(tmp_path: Path) -> None:
    calls: list[str] = []
    with sharded(tmp_path) as (_, model):
        optimizer = tiermem.optim.AdamW(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        take_step(model, optimizer, 0)
        take_step(model, optimizer, 1)
    assert calls == ["pre", "post"] * 2


def test_step_takes_a_closure_and_returns_its_value(tmp_path: Path) -> None:
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), fused=True)
    with sharded(tmp_path) as (_, ours):
        optimizer = tiermem.optim.AdamW(ours.parameters())

        def closure_of(model: Any, opt: Any) -> Callable[[], Any]:
            def closure() -> Any:
                opt.zero_grad()
                loss = model(torch.ones(2, 64)).square().mean()
                loss.backward()
                return loss

            return closure

        for _ in range(3):
            expected = their.step(closure_of(theirs, their))
            got = optimizer.step(closure_of(ours, optimizer))
            assert float(got.detach()) == float(expected.detach())
        assert_equal_to(ours, theirs)
