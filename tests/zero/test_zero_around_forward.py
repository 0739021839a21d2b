"""What people wrap around forwards: compilers, odd outputs, threads."""

from __future__ import annotations

import dataclasses
import threading
from typing import NamedTuple

import pytest
import torch
from zero_models import Plain, loss_of
from zero_twins import batch


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    logits: torch.Tensor
    note: str = ""


class Pair(NamedTuple):
    hidden: torch.Tensor
    extra: dict


class WithOutputs(Plain):
    """Blocks and root give dataclasses, named tuples and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:2]:
            block.register_forward_hook(lambda m, a, o: Output(o, o * 2, "kept"))
        for block in self.blocks[2:]:
            block.register_forward_hook(lambda m, a, o: Pair(o, {"all": [o * 3], "none": None}))

    def forward(self, tokens: torch.Tensor) -> Output:
        x = self.embedding(tokens)
        for block in self.blocks[:2]:
            result = block(x)
            assert result.note == "kept"
            x = result.hidden + result.logits
        for block in self.blocks[2:]:
            result = block(x)
            x = result.hidden + result.extra["all"][0]
        return Output(x, self.head(x))


@pytest.mark.parametrize("mode", ["deferred", "backward"])
def test_structured_outputs(make_twins, mode: str) -> None:
    twins = make_twins(
        WithOutputs, loss=lambda m, tokens: m(tokens).logits.square().mean(), update=mode
    )
    twins.steps(3)
    twins.check()


def test_compiled_blocks(make_twins) -> None:
    twins = make_twins()
    for model, _ in twins.both:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="eager")
    twins.steps(3)
    assert [a for a, _ in twins.losses] == [b for _, b in twins.losses]


def test_compiled_in_place(make_twins) -> None:
    twins = make_twins()
    for model, _ in twins.both:
        for block in model.blocks:
            block.compile(backend="eager")
    twins.steps(3)
    twins.check()


def test_training_in_another_thread(twins) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            twins.steps(3)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    twins.check()


def test_keyword_arguments_and_module_hooks(twins) -> None:
    for model, _ in twins.both:
        model.blocks[0].register_forward_pre_hook(
            lambda m, args, kwargs: (args, {k: v * 1.5 for k, v in kwargs.items()}), with_kwargs=True
        )

    def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return model.head(model.blocks[0](x=model.embedding(tokens))).square().mean()

    for seed in range(3):
        twins.step(seed, loss)
    twins.check()


def test_anomaly_detection(twins) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        twins.steps(2)
    twins.check()


def test_set_multithreading_disabled(twins) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        twins.steps(2)
    twins.check()


def test_profiler(twins) -> None:
    with torch.profiler.profile():
        loss_of(twins.model, batch(0))
    twins.steps(2)
    twins.check()
