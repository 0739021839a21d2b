"""``Module._apply`` and its kin: what changes nothing works, what would is refused with a remedy."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero_twins import batch

from tiermem.errors import StateError

NOTHING = {
    "to device": lambda m: m.to("cpu"),
    "to dtype": lambda m: m.to(torch.float32),
    "to both": lambda m: m.to("cpu", torch.float32),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "type": lambda m: m.type(torch.float32),
    "train": lambda m: m.train(),
    "apply": lambda m: m.apply(lambda module: None),
    "zero_grad": lambda m: m.zero_grad(),
}


@pytest.mark.parametrize("moment", ["no gradients", "gradients"])
def test_no_op_conversions_keep_placeholders(twins, moment: str) -> None:
    twins.step()
    before = list(twins.model.parameters())
    conversions = dict(NOTHING)
    if moment == "gradients":
        for model, _ in twins.both:
            twins.loss(model, batch(1)).backward()
        del conversions["zero_grad"]
    reads = twins.runtime.stats().read_bytes
    for what, convert in conversions.items():
        for model, _ in twins.both:
            assert convert(model) is (None if what == "zero_grad" else model), what
        assert all(a is b for a, b in zip(before, twins.model.parameters(), strict=True)), what
        assert twins.runtime.stats().read_bytes == reads, what
    for _, optimizer in twins.both:
        optimizer.step()
        optimizer.zero_grad()
    twins.steps(2, first=2)
    twins.check()


def _parametrize(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[0].up)


def _spectral(model: nn.Module) -> None:
    nn.utils.parametrizations.spectral_norm(model.head)


def _prune(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Identity())


REFUSED = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.bfloat16),
    "type": lambda m: m.type(torch.float64),
    "to_empty": lambda m: m.to_empty(device="meta"),
    "to meta": lambda m: m.to("meta"),
    "share_memory": lambda m: m.share_memory(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda m: torch.save(m, io.BytesIO()),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(m),
    "weight norm": _parametrize,
    "spectral norm": _spectral,
    "parametrization": _prune,
}


@pytest.mark.parametrize("what", REFUSED)
def test_conversions_are_refused_and_the_model_goes_on(twins, what: str) -> None:
    twins.step()
    names = [name for name, _ in twins.model.named_parameters()]
    with pytest.raises(StateError, match="Remedy"):
        REFUSED[what](twins.model)
    assert [name for name, _ in twins.model.named_parameters()] == names
    twins.steps(2, first=1)
    twins.check()


@pytest.mark.usefixtures("process_group")
def test_data_parallel_wrapping_is_refused(twins) -> None:
    twins.step()
    with pytest.raises(StateError, match="Remedy"):
        DistributedDataParallel(twins.model)(batch(0))
    twins.steps(2, first=1)
    twins.check()
