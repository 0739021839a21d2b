"""GatheredParameters keeps what one rank has written, by whatever means, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tiermem
from tiermem.errors import ConfigError, StateError
from tiermem.zero.gathered_parameters import GatheredParameters

STEPS = 2


def through_module(model: nn.Module, param: torch.Tensor, value: torch.Tensor) -> None:
    model[0].weight.data = value


MEANS: dict[str, Callable[[Any, Any, torch.Tensor], object]] = {
    "copy_": lambda model, param, value: param.copy_(value),
    "initialiser": lambda model, param, value: nn.init.constant_(param, 0.0).add_(value),
    "data.copy_": lambda model, param, value: param.data.copy_(value),
    "data of the module": lambda model, param, value: model[0].weight.data.copy_(value),
    "bits": lambda model, param, value: param.data.view(torch.int16).copy_(value.view(torch.int16)),
    "other data": through_module,
    "other data of the parameter": lambda model, param, value: setattr(param, "data", value),
}


def build() -> nn.Sequential:
    """The first unit has a large parameter and two small, persistent ones."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32, bias=False))


def settings(tmp: str, **changes: Any) -> dict[str, Any]:
    base = {
        "device": "cpu",
        "host_memory": "32MiB",
        "compute_dtype": "bf16",
        "persistence_threshold_numel": 1000,
        "optimizer": "nvme",
        "paths": [tmp],
        "resident_memory": 0,
        "poison_released": True,
    }
    return base | changes


def configs(tmp: str) -> list[dict[str, Any]]:
    return [
        settings(tmp, params="nvme", prefetch_bytes=0, device_memory="64KiB"),
        settings(tmp, persistence_threshold_numel=100_000),
        settings(tmp, stage=2),
    ]


class Rig:
    """A model in training: its masters are no longer what its parameters are."""

    def __init__(self, rank: int, config: dict[str, Any]) -> None:
        self.rank = rank
        self.runtime = tiermem.Runtime(config)
        self.model = tiermem.shard(build(), self.runtime)
        self.optimizer = tiermem.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step()

    def step(self) -> None:
        x = torch.ones(2, 64, dtype=torch.bfloat16) * (1 + self.rank)
        self.model(x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def masters(self) -> list[torch.Tensor]:
        return [tiermem.full_master(param) for param in self.model.parameters()]

    def params(self) -> list[torch.Tensor]:
        return [tiermem.full_param(param) for param in self.model.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


def value(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(64, 64, generator=generator).to(torch.bfloat16)


def write_and_keep(rank: int, size: int, every: list[dict[str, Any]], names: list[str]) -> None:
    writer = size - 1
    for config in every:
        rig = Rig(rank, config)
        for name in names:
            before = rig.masters()
            params = list(rig.model.parameters())
            with torch.no_grad(), GatheredParameters(params, modifier_rank=writer):
                assert rig.model[0].weight.data_ptr() != 0
                MEANS[name](rig.model, params[0], value(rank))
            assert torch.equal(tiermem.full_param(params[0]), value(writer)), name
            assert torch.equal(tiermem.full_master(params[0]), value(writer).float()), name
            # What was not written keeps the lower bits of its masters.
            assert equal(rig.masters(), before) == [False, True, True, True, True], name
            rig.step()
        rig.runtime.close()


@pytest.mark.parametrize("size", [1, 2])
def test_the_writes_of_one_rank_are_kept_by_all(size: int, tmp_path: Any) -> None:
    run_ranks(write_and_keep, size, configs(str(tmp_path)), list(MEANS), timeout_s=100)


def write_and_forget(rank: int, size: int, every: list[dict[str, Any]], names: list[str]) -> None:
    for config in every:
        rig, untouched = Rig(rank, config), Rig(rank, config)
        for name in names:
            before, masters = rig.params(), rig.masters()
            params = list(rig.model.parameters())
            with torch.no_grad(), GatheredParameters(params):
                MEANS[name](rig.model, params[0], value(rank))
                params[1].data.add_(1)
                assert torch.equal(rig.model[0].weight, value(rank))
                params[0].sum()  # uses between do not make it last
                rig.model(torch.ones(2, 64, dtype=torch.bfloat16))
            assert all(equal(rig.params(), before)), name
            assert all(equal(rig.masters(), masters)), name
            rig.step()
            untouched.step()
            assert all(equal(rig.masters(), untouched.masters())), name
        rig.runtime.close()
        untouched.runtime.close()


@pytest.mark.parametrize("size", [1, 2])
def test_without_a_rank_nothing_is_kept(size: int, tmp_path: Any) -> None:
    run_ranks(write_and_forget, size, configs(str(tmp_path)), list(MEANS)[::3], timeout_s=100)


@pytest.fixture(params=[0, 1, 2])
def rig(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    made = Rig(0, configs(str(tmp_path))[request.param])
    yield made
    made.runtime.close()


def test_what_may_be_given(rig: Rig) -> None:
    plain = nn.Parameter(torch.ones(3))
    weight = rig.model[0].weight
    for params in (weight, [weight], (p for p in rig.model.parameters()), [plain, weight]):
        with GatheredParameters(params, fwd_module=rig.model):
            assert weight.data.shape == rig.model[0].weight.data.shape == (64, 64)
    for params in ([], plain, [plain]):
        with torch.no_grad(), GatheredParameters(params, modifier_rank=0):
            plain += 1
    assert plain[0] == 4
    with GatheredParameters(weight, enabled=False), pytest.raises(StateError, match=r"\.data"):
        weight.data.sum()
    with pytest.raises(StateError, match=r"\.data"):
        weight.data.sum()


@pytest.mark.parametrize(("outer", "kept"), [(None, False), (0, True)])
@pytest.mark.parametrize("inner", [None, 0])
def test_of_nested_blocks_the_outermost_decides(
    rig: Rig, outer: int | None, inner: int | None, kept: bool
) -> None:
    params = list(rig.model.parameters())
    before = rig.masters()
    with torch.no_grad(), GatheredParameters(params, modifier_rank=outer):
        params[3].data.fill_(0.5)
        with GatheredParameters(params, modifier_rank=inner):
            params[0].fill_(2.0)
        assert bool((params[0].data == 2.0).all()) == (inner is not None)
        assert bool((params[3].data == 0.5).all())
    after = rig.masters()
    assert equal(after, before) == [not (kept and inner is not None), True, True, not kept, True]


def test_writes_before_the_block_stay(rig: Rig) -> None:
    weight = rig.model[0].weight
    with torch.no_grad():
        weight.fill_(0.25)
        with GatheredParameters(weight):
            weight.fill_(2.0)
    assert bool((tiermem.full_master(weight) == 0.25).all())


def test_errors_inside_come_out_and_leave_order(rig: Rig) -> None:
    weight, before = rig.model[0].weight, rig.masters()
    with pytest.raises(ValueError, match="inside"), torch.no_grad(), GatheredParameters(weight):
        weight.fill_(2.0)
        raise ValueError("inside")
    assert all(equal(rig.masters(), before))
    rig.step()


def test_a_graph_made_with_what_is_forgotten_is_out_of_date(rig: Rig) -> None:
    with GatheredParameters(list(rig.model.parameters())):
        with torch.no_grad():
            rig.model[0].weight.fill_(2.0)
        loss = rig.model(torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)).sum()
    with pytest.raises((StateError, RuntimeError), match=r"modified|changed|updated|inplace"):
        loss.backward()


def test_a_graph_made_inside_serves_outside(rig: Rig) -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    rig.model(x).sum().backward()
    expected = tiermem.full_grad(rig.model[0].weight)
    rig.optimizer.zero_grad()
    with GatheredParameters(list(rig.model.parameters())):
        loss = rig.model(x).sum()
    loss.backward()
    assert torch.equal(tiermem.full_grad(rig.model[0].weight), expected)


def test_what_cannot_be_inside_is_refused(rig: Rig) -> None:
    params = list(rig.model.parameters())
    rig.model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    with GatheredParameters(params, modifier_rank=0):
        with pytest.raises(StateError, match="cannot be updated inside GatheredParameters"):
            rig.optimizer.step()
        with pytest.raises(StateError, match="cannot be set inside GatheredParameters"):
            tiermem.set_full_master(params[0], torch.zeros(64, 64))
        with pytest.raises(StateError, match=r"data of shape \(3,\)"):
            params[0].data = torch.zeros(3)
    with pytest.raises(StateError, match="were replaced by others of shape"):  # noqa: SIM117
        with GatheredParameters(params, modifier_rank=0):
            rig.model[0].weight.data = torch.zeros(3)
    rig.optimizer.step()


def write_dtensors(rank: int, size: int) -> None:
    """The ranks of another dimension, which have other parts, each keep their own."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    with tiermem.Runtime({"device": "cpu", "host_memory": "32MiB"}) as runtime:
        tiermem.shard(model, runtime, mesh=mesh["dp"])
        param = model[0].weight
        for modifier_rank, kept in ((rank, 3.0), (None, 3.0)):
            with torch.no_grad(), GatheredParameters(param, modifier_rank=modifier_rank):
                model[0].weight.fill_(3.0 if modifier_rank is not None else 5.0)
            assert bool((tiermem.full_param(param).full_tensor() == kept).all())


def test_dtensors() -> None:
    run_ranks(write_dtensors, 2, timeout_s=60)


def name_another(rank: int, size: int, config: dict[str, Any]) -> None:
    rig = Rig(rank, config)
    with pytest.raises(ConfigError, match=r"modifier_rank is 7, but '.*' is shared by rank 0, rank 1"):
        GatheredParameters(rig.model.parameters(), modifier_rank=7).__enter__()
    rig.runtime.close()


def test_an_unknown_rank_is_refused(tmp_path: Any) -> None:
    run_ranks(name_another, 2, configs(str(tmp_path))[0], timeout_s=60)
