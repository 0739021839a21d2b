"""Two dimensions: states are shared out over one, the model is split over the other (2 x 2 ranks)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_rig import clipped_in_one_process
from ranks import run_ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import tiermem

WIDTH, HIDDEN = 64, 128
CONFIG = {"device": "cpu", "host_memory": "64MiB", "persistence_threshold_numel": 100}


class _Enter(torch.autograd.Function):
    """The same forwards, the sum of gradients over the group backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """The sum over the group forwards, the same backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Block(nn.Module):
    """A column-parallel and a row-parallel layer; ``group`` None: whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.group: Any = None

    def split(self, group: Any) -> None:
        self.group, rank, size = group, group.rank(), group.size()
        for linear, dim in ((self.up, 0), (self.down, 1)):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim)[rank].clone())
        self.up.bias = nn.Parameter(self.up.bias.detach().chunk(size)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.group is None:
            return x + self.down(functional.gelu(self.up(y))) + self.bias
        y = self.down(functional.gelu(self.up(_Enter.apply(y, self.group))))
        return x + _Leave.apply(y, self.group) + self.bias


SPLIT = ("up.weight", "up.bias", "down.weight")


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block() for _ in range(3)], nn.Linear(WIDTH, 16))


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(parts: list[np.ndarray], name: str) -> np.ndarray:
    if not name.endswith(SPLIT):
        assert all(np.array_equal(part, parts[0]) for part in parts), name
        return parts[0]
    return np.concatenate(parts, 1 if name.endswith("down.weight") else 0)


def loss_at(model: nn.Module, step: int) -> torch.Tensor:
    """On the batches of both ranks of the first dimension."""
    return model(torch.cat([data(0, step), data(1, step)])).square().mean()


def split_by_hand(rank: int, size: int, stage: int, clip: float, steps: int) -> Any:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build()
    for block in model[1:4]:
        block.split(mesh["tp"].get_group())
    once = [name for name, _ in model.named_parameters() if not name.endswith(SPLIT)]
    with tiermem.Runtime({**CONFIG, "stage": stage}) as runtime:
        tiermem.shard(model, runtime, mesh=mesh["dp"], model_mesh=mesh["tp"], replicated=once)
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        norms = []
        for step in range(steps):
            model(data(mesh["dp"].get_local_rank(), step)).square().mean().backward()
            norms.append(optimizer.clip_grad_norm_(clip).item())
            optimizer.step()
            optimizer.zero_grad()
        params = {n: tiermem.full_param(p).numpy() for n, p in model.named_parameters()}
    return mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank(), params, norms


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_model_split_by_hand(stage: int) -> None:
    """The unsharded model's norms and parameters, to rounding: sums are made in another order."""
    clip, steps = 0.05, 4
    expected, norms = clipped_in_one_process(build(), loss_at, clip, steps)
    results = run_ranks(split_by_hand, 4, stage, clip, steps, timeout_s=100)
    assert all(each[3] == results[0][3] for each in results)  # the same factor on all ranks
    np.testing.assert_allclose(results[0][3], norms, rtol=1e-5)
    assert min(norms) > clip
    for dp in (0, 1):
        parts = sorted((each for each in results if each[0] == dp), key=lambda each: each[1])
        for name, value in expected.items():
            found = whole([each[2][name] for each in parts], name)
            # A step moves every element by about lr; gradients near 0 may take another sign.
            np.testing.assert_allclose(found, value, atol=2e-4, err_msg=name)


def wrong_names(rank: int, size: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with tiermem.Runtime(CONFIG) as runtime:
        with pytest.raises(tiermem.errors.StateError, match=r"2 dimensions; .*mesh\['dp'\]"):
            tiermem.shard(build(), runtime, mesh=mesh)
        with pytest.raises(tiermem.errors.StateError, match=r"names no parameters: 7\.weight"):
            tiermem.shard(build(), runtime, mesh=mesh["dp"], replicated=["0.weight", "7.weight"])
    return "refused"


def test_refusals() -> None:
    assert run_ranks(wrong_names, 2) == ["refused", "refused"]
