"""What happens between the forwards, backwards and steps of a training changes none of its bits, alone
and over two ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import CheckpointedReentrant, Dropout, FrozenBlocks, Plain, loss_of
from zero_ranks import (
    CaseRunner,
    Cases,
    RankTwins,
    at_sizes,
    changes_of,
    make_twins,
    twins_on,
)

Build = Callable[[], nn.Module]


def opened(build: Build, path: str, stage: int, **changes: Any) -> RankTwins:
    return make_twins(build, path, **{**changes_of(stage), **changes})


def toggled(path: str, stage: int) -> None:
    """Frozen and thawed between steps; states stay."""
    twins = opened(Plain, path, stage)
    with twins.runtime:
        twins.step(0)
        for frozen in (True, False):
            for model, _ in twins.both:
                model.blocks[1].up.requires_grad_(not frozen)
                model.blocks[2].requires_grad_(not frozen)
            twins.steps(2, first=1 if frozen else 3)
            twins.check()


def thawed(path: str, stage: int) -> None:
    """What was frozen when the model was sharded gets states when it is trained first, and keeps them
    while it is frozen again."""
    twins = opened(FrozenBlocks, path, stage)
    with twins.runtime:
        twins.step(0)
        assert twins.optimizer.state.get(twins.model.blocks[1].up.weight) is None
        for step, trained in enumerate((True, False, True), start=1):
            for model, _ in twins.both:
                model.blocks[1].requires_grad_(trained)
            twins.step(step)
        twins.check()


def frozen_midway(path: str, stage: int, after: str) -> None:
    """Frozen between the forward and its backward, which then gives it no gradient; or between the
    backward and the step, which then takes the gradient that there is."""
    twins = opened(Plain, path, stage)
    with twins.runtime:
        for step in range(3):
            for model, optimizer in twins.both:
                loss = loss_of(model, twins.batch(step))
                if after == "backward":
                    loss.backward()
                model.blocks[1].requires_grad_(False)
                if after == "forward":
                    loss.backward()
                twins.update(model, optimizer)
                model.blocks[1].requires_grad_(True)
        twins.check()


def two_models(path: str, stage: int) -> None:
    """Two models on one runtime, stepped in turn."""
    first = opened(Plain, path, stage, device_memory="4MiB")
    with first.runtime:
        second = twins_on(first.runtime, Plain, seed=8)
        for seed in range(3):
            first.step(seed)
            second.step(seed + 10)
        first.check()
        second.check()


def evaluated(path: str, stage: int) -> None:
    """Evaluation between steps, by another number of batches each time."""
    twins = opened(Plain, path, stage, prefetch_bytes=200_000)
    with twins.runtime:
        for seed in range(3):
            twins.step(seed)
            for model, _ in twins.both:
                model.eval()
            for number in range(seed):
                assert_same_outputs(twins, seed + number)
            for model, _ in twins.both:
                model.train()
        twins.check()


def written(path: str, stage: int) -> None:
    """Parameters that the user writes between steps."""
    twins = opened(Plain, path, stage)
    with twins.runtime:
        twins.step(0)
        for model, _ in twins.both:
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(0.5)
                model.head.weight.copy_(model.head.weight.clone() + 1)
        twins.step(1)
        twins.check()


def retained(path: str, stage: int, build: Build) -> None:
    """Two backwards through one graph."""
    twins = opened(build, path, stage)
    with twins.runtime:
        for step in range(3):
            for model, optimizer in twins.both:
                loss = loss_of(model, twins.batch(step))
                loss.backward(retain_graph=True)
                loss.backward()
                twins.update(model, optimizer)
        twins.check()


def looked_before_backward(path: str, stage: int) -> None:
    """A pass of the same model without gradients between a forward and its backward, as for a
    divergence from its own former values."""
    twins = opened(Plain, path, stage)
    with twins.runtime:
        for step in range(3):
            values = []
            for model, optimizer in twins.both:
                now = model(twins.batch(step))
                for context in (torch.no_grad, torch.inference_mode):
                    with context():
                        values.append(model(twins.batch(step + 1)).clone())
                before = values[-2].softmax(-1)
                loss = (before * (before.log() - now.log_softmax(-1))).sum(-1).mean()
                loss.backward()
                twins.update(model, optimizer)
                values.append(loss.detach())
            assert all(torch.equal(a, b) for a, b in zip(values[:3], values[3:], strict=True))
        twins.check()


def looked_before_step(path: str, stage: int) -> None:
    twins = opened(Plain, path, stage)
    with twins.runtime:
        for step in range(3):
            for model, _ in twins.both:
                loss_of(model, twins.batch(step)).backward()
            assert_same_outputs(twins, step + 1)
            for model, optimizer in twins.both:
                twins.update(model, optimizer)
        twins.check()


def inference_first(path: str, stage: int) -> None:
    """The very first use is in inference mode, and so is one between steps."""
    twins = opened(Dropout, path, stage)
    with twins.runtime:
        assert_same_outputs(twins, 0, torch.inference_mode)
        twins.steps(2)
        assert_same_outputs(twins, 1, torch.inference_mode)
        twins.step(2)
        twins.check()


def aborted(path: str, stage: int, error: type[BaseException], context: Any) -> None:
    """An evaluation that fails in the middle, on all ranks; whatever it has left behind, training and
    a further evaluation are right."""
    twins = opened(Plain, path, stage, prefetch_bytes=200_000)

    def fail(*_: Any) -> None:
        raise error("in the middle")

    with twins.runtime:
        twins.step(0)
        for number, part in enumerate(("1", "2.up", "3.down"), start=1):
            for model, _ in twins.both:
                model.eval()
                hook = model.blocks.get_submodule(part).register_forward_pre_hook(fail)
                with context(), pytest.raises(error, match="in the middle"):
                    model(twins.batch(number))
                hook.remove()
                model.train()
            twins.step(number)
            assert_same_outputs(twins, number)
        twins.check()


def assert_same_outputs(twins: RankTwins, seed: int, context: Any = torch.no_grad) -> None:
    torch.manual_seed(seed)
    outputs = []
    for model, _ in twins.both:
        training = model.training
        model.eval()
        with context():
            outputs.append(model(twins.batch(seed)))
        model.train(training)
    assert torch.equal(*outputs)


ACTS: dict[str, Callable[..., None]] = {
    "toggled": toggled,
    "thawed": thawed,
    "frozen before backward": functools.partial(frozen_midway, after="forward"),
    "frozen before step": functools.partial(frozen_midway, after="backward"),
    "two models": two_models,
    "evaluated": evaluated,
    "written": written,
    "retained": functools.partial(retained, build=Plain),
    "retained under reentrant checkpoints": functools.partial(retained, build=CheckpointedReentrant),
    "looked before backward": looked_before_backward,
    "looked before step": looked_before_step,
    "inference first": inference_first,
    "aborted": functools.partial(aborted, error=ZeroDivisionError, context=torch.no_grad),
    "interrupted": functools.partial(aborted, error=KeyboardInterrupt, context=torch.no_grad),
    "aborted in inference mode": functools.partial(
        aborted, error=ZeroDivisionError, context=torch.inference_mode
    ),
    "interrupted in training mode": functools.partial(
        aborted, error=KeyboardInterrupt, context=torch.enable_grad
    ),
}
AT_STAGE_0 = (toggled, two_models, evaluated, written)
CASES: Cases = {
    f"{name}, stage {stage}": functools.partial(act, stage=stage)
    for name, act in ACTS.items()
    for stage in ((3, 2, 0) if act in AT_STAGE_0 else (3, 2))
}
IN_SHORT = (
    "toggled",
    "thawed",
    "retained",
    "looked before backward",
    "inference first",
    "interrupted",
)


@pytest.mark.parametrize(
    ("name", "size"),
    at_sizes(CASES, {f"{name}, stage 3" for name in IN_SHORT}.__contains__),
)
def test_around_training(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
