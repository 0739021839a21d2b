"""A step of an engine: accumulation, clipping, schedule and overflow, against the plain loop."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine_rig import (
    assert_equal_to,
    batch,
    config,
    engine_of,
    loss_of,
    make_net,
    micro_step,
    plain_step,
)

import tiermem
from tiermem.errors import StateError


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_bits_of_the_plain_loop(stage: int, micro_steps: int) -> None:
    settings = config(gradient_accumulation_steps=micro_steps, zero_optimization={"stage": stage})
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    with engine_of(settings) as engine:
        assert engine.train_batch_size() == 4 * micro_steps
        for step in range(3):
            numbers = [10 * step + micro for micro in range(micro_steps)]
            assert [micro_step(engine, n) for n in numbers] == plain_step(theirs, their, numbers)
        assert_equal_to(engine.module, theirs)
        assert (engine.global_steps, engine.micro_steps) == (3, 3 * micro_steps)
        assert engine.global_samples == 12 * micro_steps


def test_backward_returns_the_loss_that_counts() -> None:
    with engine_of(config(gradient_accumulation_steps=4, fp16={"enabled": True})) as engine:
        loss = loss_of(engine, 0, torch.float16)
        assert engine.backward(loss).item() == loss.item() / 4
        again = loss_of(engine, 0, torch.float16)
        assert engine.backward(again, scale_wrt_gas=False).item() == loss.item()


@pytest.mark.parametrize("largest", [1e-3, 1e3])
def test_clipping_and_the_norm(largest: float) -> None:
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    norms: list[float] = []

    def clip() -> None:
        norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest)))

    with engine_of(config(gradient_clipping=largest)) as engine:
        assert engine.get_global_grad_norm() is None
        for step in range(3):
            micro_step(engine, step)
            plain_step(theirs, their, [step], before=clip)
            assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-6)
        for ours, twin in zip(engine.module.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(tiermem.full_param(ours), twin.detach(), rtol=1e-5, atol=1e-6)


def test_the_norm_is_known_without_clipping() -> None:
    with engine_of(config()) as engine:
        micro_step(engine, 0)
        theirs = make_net()
        loss_of(theirs, 0).backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
        assert engine.get_global_grad_norm() == pytest.approx(float(expected), rel=1e-6)


def test_the_schedule_follows_steps_not_micro_steps() -> None:
    settings = config(
        gradient_accumulation_steps=2,
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    )
    with engine_of(settings) as engine:
        rates = []
        for number in range(8):
            micro_step(engine, number)
            rates.append(engine.get_lr()[0])
        assert rates == pytest.approx([0, 0, 0, 0.025, 0.025, 0.05, 0.05, 0.075])


def test_an_overflow_is_no_step() -> None:
    settings = config(
        fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
    )
    with engine_of(settings) as engine:
        before = [tiermem.full_param(p) for p in engine.parameters()]
        engine.backward(loss_of(engine, 0, torch.float16) * float("inf"))
        engine.step()
        assert not engine.was_step_applied()
        assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (1, 1, 2**7)
        assert engine.lr_scheduler.last_batch_iteration == -1
        assert all(map(torch.equal, before, [tiermem.full_param(p) for p in engine.parameters()]))
        micro_step(engine, 1, torch.float16)
        assert engine.was_step_applied()
        assert engine.lr_scheduler.last_batch_iteration == 0
        assert engine.fp16_enabled()


def test_a_boundary_may_be_set_by_hand() -> None:
    theirs = make_net()
    their = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    with engine_of(config(gradient_accumulation_steps=2)) as engine:
        engine.set_gradient_accumulation_boundary(False)
        for number in range(3):
            if number == 2:
                engine.set_gradient_accumulation_boundary(True)
            micro_step(engine, number)
            assert engine.was_step_applied() == (number == 2)
        for number in range(3):
            (loss_of(theirs, number) / 2).backward()
        their.step()
        assert_equal_to(engine.module, theirs)


def test_no_sync_leaves_gradients_for_later() -> None:
    with engine_of(config(gradient_accumulation_steps=2)) as engine:
        with engine.no_sync():
            micro_step(engine, 0)
        micro_step(engine, 1)
        assert engine.global_steps == 1


@pytest.mark.parametrize(
    ("loss", "message"),
    [(torch.ones(2, 3), r"not \(2, 3\)"), (0.5, "not float"), (None, "not NoneType")],
)
def test_a_loss_that_is_none(loss: Any, message: str) -> None:
    with engine_of(config()) as engine, pytest.raises(StateError, match=message):
        engine.backward(loss)


def test_steps_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "tiermem.engine"),
        engine_of(config(steps_per_print=2)) as engine,
    ):
        for number in range(4):
            micro_step(engine, number)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 2", "step 4"]


def test_attributes_of_the_model_show_through() -> None:
    model = make_net()
    model.generate = lambda: "text"
    with engine_of(config(), model) as engine:
        assert engine.generate() == "text"
        assert engine.module is model
        assert not hasattr(engine, "nonsense")
        with pytest.raises(AttributeError, match=r"save_checkpoint is not built yet.*torch\.save"):
            engine.save_checkpoint("x")
        engine.eval()
        assert not model[0].training
        with torch.no_grad():
            assert engine(batch(0)).shape == (4, 64)
        engine.train()
        micro_step(engine, 0)


def test_a_schedule_that_raises_does_not_shift_the_boundaries() -> None:
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    with engine_of(config(gradient_accumulation_steps=2), lr_scheduler=plateau) as engine:
        micro_step(engine, 0)
        with pytest.raises(TypeError, match="metrics"):
            micro_step(engine, 1)
        micro_step(engine, 2)
        assert (engine.global_steps, engine.micro_steps) == (1, 3)
        engine.backward(loss_of(engine, 3))
        engine.step(lr_kwargs={"metrics": 1.0})
        assert engine.global_steps == 2
        engine.set_lr(0.5)
        assert engine.get_lr() == [0.5]
