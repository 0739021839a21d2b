"""``Module._apply`` and its kin: what changes nothing works, what would is refused with a remedy."""

from __future__ import annotations

import copy
import io
import pickle
import socket

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


@pytest.mark.parametrize("what", NOTHING)
@pytest.mark.parametrize("moment", ["no gradients", "gradients"])
def test_no_op_conversions_keep_placeholders(twins, what: str, moment: str) -> None:
    twins.step()
    if moment == "gradients":
        for model, _ in twins.both:
            twins.loss(model, batch(1)).backward()
    before = list(twins.model.parameters())
    reads = twins.runtime.stats().read_bytes
    for model, _ in twins.both:
        assert NOTHING[what](model) is (None if what == "zero_grad" else model)
    assert all(a is b for a, b in zip(before, twins.model.parameters(), strict=True))
    assert twins.runtime.stats().read_bytes == reads
    if moment == "gradients":
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


@pytest.fixture
def process_group():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_data_parallel_wrapping_is_refused(twins) -> None:
    twins.step()
    with pytest.raises(StateError, match="Remedy"):
        DistributedDataParallel(twins.model)(batch(0))
    twins.steps(2, first=1)
    twins.check()
