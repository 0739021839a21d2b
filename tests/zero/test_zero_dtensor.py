"""Models that torch's own tensor parallelism has split: DTensor parameters, on 2 x 2 ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from rank_rig import clipped_in_one_process
from ranks import run_ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.errors import StateError

VOCABULARY, WIDTH, HIDDEN, LENGTH = 96, 64, 128, 16
CONFIG = {"device": "cpu", "host_memory": "64MiB", "persistence_threshold_numel": 100}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.ones(1))  # an ordinary parameter among the others
        self.head.register_buffer("calls", torch.zeros(4))  # parallelize_module makes it a DTensor
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x) * self.scale


def build(**options: Any) -> Model:
    torch.manual_seed(5)
    return Model(**options)


def split(model: Model, mesh: DeviceMesh) -> Model:
    """As torch's guides have it: sequence parallelism around column- and row-wise layers."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan[f"blocks.{index}.norm"] = SequenceParallel()
        plan[f"blocks.{index}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{index}.down"] = RowwiseParallel(output_layouts=Shard(1))
        plan[f"blocks.{index}"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
        )
    parallelize_module(model, mesh, plan)
    return model


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def data(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def whole(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().numpy()


def train(
    model: nn.Module, optimizer: Any, dp: int, steps: int, clip: float | None
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, data(dp, step))
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def loss_at(model: nn.Module, step: int) -> torch.Tensor:
    """On the batches of both data-parallel ranks."""
    return loss_of(model, torch.cat([data(0, step), data(1, step)]))


def clipped(rank: int, size: int, stage: int, clip: float, steps: int) -> Any:
    torch.set_num_threads(1)
    mesh = two_by_two()
    model = split(build(), mesh["tp"])
    with tiermem.Runtime({**CONFIG, "stage": stage}) as runtime:
        tiermem.shard(model, runtime, mesh=mesh["dp"])
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        _, norms = train(model, optimizer, mesh["dp"].get_local_rank(), steps, clip)
        return {n: whole(tiermem.full_param(p)) for n, p in model.named_parameters()}, norms


@pytest.mark.parametrize(
    "stage", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)]
)
def test_clipping_over_both_dimensions(stage: int) -> None:
    """The whole model's norms and parameters, to rounding: sums are made in another order."""
    clip, steps = 0.05, 4
    expected, norms = clipped_in_one_process(build(), loss_at, clip, steps)
    results = run_ranks(clipped, 4, stage, clip, steps, timeout_s=100)
    assert min(norms) > clip
    for params, found in results:
        assert found == results[0][1]  # the same factor on all ranks
        np.testing.assert_allclose(found, norms, rtol=1e-5)
        for name, value in expected.items():
            # A step moves every element by about lr; gradients near 0 may take another sign.
            np.testing.assert_allclose(params[name], value, atol=2e-4, err_msg=name)


def beside_fsdp2(rank: int, size: int, precision: str, recompute: bool) -> Any:
    torch.set_num_threads(1)
    mesh = two_by_two()
    dp, steps = mesh["dp"].get_local_rank(), 3
    model = split(build(recompute=recompute), mesh["tp"])
    config = {**CONFIG, "compute_dtype": precision, "update": "backward"}
    with tiermem.Runtime(config) as runtime:
        tiermem.shard(model, runtime, mesh=mesh["dp"])
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        ours, _ = train(model, optimizer, dp, steps, None)
        params = {n: whole(tiermem.full_param(p)) for n, p in model.named_parameters()}
        masters = {n: whole(tiermem.full_master(p)) for n, p in model.named_parameters()}
        moments = {n: whole(optimizer.state[p]["exp_avg"]) for n, p in model.named_parameters()}
        kinds = {n: type(tiermem.full_param(p)).__name__ for n, p in model.named_parameters()}
    assert kinds.pop("scale") == "Tensor"
    assert set(kinds.values()) == {"DTensor"}
    if precision == "bf16":
        return ours, params, masters
    theirs = split(build(recompute=recompute), mesh["tp"])
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(theirs, mesh=mesh["dp"])
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    losses, _ = train(theirs, adam, dp, steps, None)
    assert ours == losses
    for name, param in theirs.named_parameters():
        assert np.array_equal(whole(param), params[name]), name
        assert np.array_equal(whole(param), masters[name]), name
        found = whole(adam.state[param]["exp_avg"])
        assert np.array_equal(found, moments[name]), name
    return None


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_bits_of_fsdp2(recompute: bool) -> None:
    """Losses, parameters and moments of FSDP2 over the same mesh."""
    assert run_ranks(beside_fsdp2, 4, "fp32", recompute, timeout_s=100) == [None] * 4


def test_bf16_with_masters() -> None:
    """The wrapper takes the dtype of its part, and masters keep what it rounds."""
    results = run_ranks(beside_fsdp2, 4, "bf16", False, timeout_s=100)
    losses, params, masters = results[0]
    assert np.isfinite(losses).all()
    for name, value in params.items():
        assert all(np.array_equal(masters[name], each[2][name]) for each in results), name
        rounded = torch.from_numpy(masters[name]).to(torch.bfloat16).float().numpy()
        assert np.array_equal(rounded, value), name
    assert any(not np.array_equal(masters[name], params[name]) for name in params)


def seen_by_the_user(rank: int, size: int) -> str:
    torch.set_num_threads(1)
    mesh = two_by_two()
    dp = mesh["dp"].get_local_rank()
    plain = {n: p.detach().clone() for n, p in build().named_parameters()}
    model = split(build(), mesh["tp"])
    with tiermem.Runtime({**CONFIG, "gradient_accumulation_steps": 2}) as runtime:
        tiermem.shard(model, runtime, mesh=mesh["dp"])
        weight = model.blocks[0].up.weight
        assert weight.shape == (HIDDEN, WIDTH)
        assert weight.placements == (Shard(0),)
        assert weight.device_mesh == mesh["tp"]
        assert weight.to_local().shape == (HIDDEN // 2, WIDTH)
        assert torch.equal(weight.full_tensor(), plain["blocks.0.up.weight"])
        assert torch.equal(
            weight.redistribute(placements=[Replicate()]).to_local(), plain["blocks.0.up.weight"]
        )
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            loss_of(model, data(dp, 0)).backward()
        norm = model.blocks[0].norm.weight
        assert norm.grad is not None
        assert norm.grad.shape == (WIDTH,)
        gradient = tiermem.full_grad(weight)
        assert isinstance(gradient, DTensor)
        assert gradient.shape == weight.shape
        weight.grad = gradient.full_tensor()  # a whole one: this rank's part of it is taken
        assert torch.equal(tiermem.full_grad(weight).full_tensor(), gradient.full_tensor())
        with pytest.raises(StateError, match=r"shape \(3,\) does not fit 'blocks\.0\.up\.weight'"):
            weight.grad = torch.zeros(3)
        optimizer.step()
        optimizer.zero_grad()
        states = copy.deepcopy(optimizer.state_dict())
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        assert isinstance(saved["blocks.1.down.weight"], DTensor)
        with torch.no_grad():
            weight.mul_(2.0)  # noticed: written back, masters rebuilt
        assert torch.equal(weight.full_tensor(), 2 * saved["blocks.0.up.weight"].full_tensor())
        expected = []
        model.load_state_dict(saved)
        for attempt in range(2):
            optimizer.load_state_dict(states)
            model.load_state_dict(saved)
            train(model, optimizer, dp, 2, None)
            found = {n: whole(tiermem.full_param(p)) for n, p in model.named_parameters()}
            expected = expected or [found]
            assert all(np.array_equal(found[n], expected[0][n]) for n in found), attempt
        with pytest.raises(StateError, match="sharded already"):
            tiermem.shard(model, runtime, mesh=mesh["dp"])
    return "done"


def test_what_the_user_sees() -> None:
    assert run_ranks(seen_by_the_user, 4, timeout_s=100) == ["done"] * 4


def from_meta(rank: int, size: int) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    mesh = two_by_two()
    with torch.device("meta"):
        model = Model()
    split(model, mesh["tp"])

    def init(module: nn.Module, name: str) -> None:
        for key, param in module.named_parameters(recurse=False):
            assert isinstance(param, DTensor) or key == "scale"
            local = param.to_local() if isinstance(param, DTensor) else param
            local.fill_(len(name) + len(key) + 0.5)
        for buffer in module.buffers(recurse=False):
            assert isinstance(buffer, DTensor)
            buffer.fill_(7.0)

    with tiermem.Runtime(CONFIG) as runtime:
        tiermem.shard(model, runtime, mesh=mesh["dp"], init=init)
        loss_of(model, data(0, 0)).backward()
        assert (whole(model.head.calls) == 7.0).all()
        return {n: whole(tiermem.full_param(p)) for n, p in model.named_parameters()}


@pytest.mark.slow
def test_initialised_from_the_meta_device() -> None:
    for params in run_ranks(from_meta, 4, timeout_s=100):
        for name, value in params.items():
            module, _, key = name.rpartition(".")
            assert (value == len(module) + len(key) + 0.5).all(), name


def three_dimensions(rank: int, size: int) -> tuple[float, float]:
    """Two pipeline stages, of which each is split over two ranks, with a parameter in common."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    stage = mesh["pp"].get_local_rank()
    model = nn.Sequential(nn.Linear(32, 64 * (1 + stage)), nn.LayerNorm(8), nn.LayerNorm(4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": SequenceParallel()})
    with tiermem.Runtime(CONFIG) as runtime:
        tiermem.shard(
            model, runtime, mesh=mesh["dp"], model_mesh=mesh["pp"], replicated=["2.weight", "2.bias"]
        )
        optimizer = tiermem.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.full(param.shape, 2.0)
        # Once: the linear layers of 64 and 128 rows, both stages' first norms, the common norm.
        numel = (64 + 128) * 33 + 2 * 16 + 8
        return optimizer.clip_grad_norm_(1.0).item(), 2.0 * numel**0.5


def test_norm_over_pipeline_and_tensor_parallel_ranks() -> None:
    for found, expected in run_ranks(three_dimensions, 4, timeout_s=100):
        assert found == pytest.approx(expected, rel=1e-6)


def split_twice(rank: int, size: int) -> tuple[float, float]:
    """DTensors, and ordinary parameters that are split by hand over the same mesh."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(8), nn.Linear(32, 16))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    with tiermem.Runtime(CONFIG) as runtime:
        once = ["1.weight", "1.bias"]
        tiermem.shard(model, runtime, mesh=mesh["dp"], model_mesh=mesh["tp"], replicated=once)
        optimizer = tiermem.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.full(param.shape, 2.0)
        numel = 64 * 33 + 2 * 8 + 2 * 16 * 33  # each rank has 16 rows of the last layer
        return optimizer.clip_grad_norm_(1.0).item(), 2.0 * numel**0.5


def test_norm_where_other_parameters_are_split_over_the_same_mesh() -> None:
    for found, expected in run_ranks(split_twice, 2):
        assert found == pytest.approx(expected, rel=1e-6)


def hopeless(rank: int, size: int) -> str:
    """One tensor-parallel rank's part overflows in every step."""
    torch.set_num_threads(1)
    mesh = two_by_two()
    model = split(build(), mesh["tp"])
    fp16 = {"max_skipped_steps": 2, "min_loss_scale": 65536}
    with tiermem.Runtime({**CONFIG, "compute_dtype": "fp16", "fp16": fp16}) as runtime:
        tiermem.shard(model, runtime, mesh=mesh["dp"])
        optimizer = tiermem.optim.AdamW(model.parameters())
        weight = model.blocks[0].up.weight
        with pytest.raises(StateError) as caught:
            for _ in range(4):
                optimizer.scale(loss_of(model, data(0, 0))).backward()
                gradient = tiermem.full_grad(weight)
                if mesh["tp"].get_local_rank() == 1:
                    gradient.to_local()[0, 0] = float("inf")
                weight.grad = gradient
                optimizer.step()
                assert optimizer.overflow
                optimizer.zero_grad()
    return str(caught.value)


def test_overflows_on_one_part_are_named_on_all_ranks() -> None:
    for said in run_ranks(hopeless, 4, timeout_s=100):
        assert "blocks.0.up.weight" in said


def refused(rank: int, size: int) -> str:
    mesh = two_by_two()
    with tiermem.Runtime(CONFIG) as runtime:
        model = split(build(), mesh["tp"])
        with pytest.raises(StateError, match=r"split over the ranks .* are in both\. Remedy: mesh ="):
            tiermem.shard(model, runtime)
        with pytest.raises(StateError, match=r"are in both\. Remedy"):
            tiermem.shard(model, runtime, mesh=mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        with pytest.raises(StateError, match=r"is a DTensor over a mesh of 2 dimensions .*fully_shard"):
            tiermem.shard(model, runtime, mesh=mesh["dp"])
        model = build()
        part = DTensor.from_local(torch.ones(WIDTH), mesh["tp"], [Partial()], run_check=False)
        model.blocks[0].norm.weight = nn.Parameter(part)
        with pytest.raises(StateError, match=r"'blocks\.0\.norm\.weight' is a DTensor placed P"):
            tiermem.shard(model, runtime, mesh=mesh["dp"])
        model = build()
        parallelize_module(model.blocks[0], mesh["tp"], {"up": ColwiseParallel()})
        parallelize_module(model.blocks[1], mesh["dp"], {"up": ColwiseParallel()})
        with pytest.raises(StateError, match=r"DTensors over different meshes"):
            tiermem.shard(model, runtime, mesh=mesh["dp"])
        dist.barrier()
    return "refused"


def test_refusals() -> None:
    assert run_ranks(refused, 4, timeout_s=100) == ["refused"] * 4
