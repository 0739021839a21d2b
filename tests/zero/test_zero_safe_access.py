"""Masters, states and gradients are read and set under DeepSpeed's names, whole or by the rank's part,
at every stage and precision, and the next step uses what was set: as plain torch does in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tiermem
from tiermem.errors import StateError
from tiermem.zero.access import full_param
from tiermem.zero.safe_access import (
    local_range,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = [("fp32", "split"), ("bf16", "split"), ("bf16", "fp32"), ("fp16", "split")]
LR = 1e-2


def build() -> nn.Sequential:
    """Its first weight and the bias (below the threshold) are cut between two ranks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32, bias=False))


def configs(tmp: str, stages: tuple[int, ...]) -> list[dict[str, Any]]:
    common = {"device": "cpu", "host_memory": "32MiB", "persistence_threshold_numel": 1000}
    made = []
    for stage in stages:
        for dtype, master in KINDS:
            config = {**common, "stage": stage, "compute_dtype": dtype, "master": master}
            if stage == 3:
                config |= {"optimizer": "nvme", "paths": [tmp], "resident_memory": 0}
            if dtype == "fp16":
                config["fp16"] = {"loss_scale": 256.0}
            made.append(config)
    return made


class Rig:
    """A sharded model beside fp32 copies, after ``micro_steps`` backwards."""

    def __init__(self, rank: int, size: int, config: dict[str, Any], micro_steps: int = 2) -> None:
        self.runtime = tiermem.Runtime(config)
        self.model = tiermem.shard(build(), self.runtime)
        self.optimizer = tiermem.optim.AdamW(self.model.parameters(), lr=LR)
        self.params = list(self.model.parameters())
        self.dtype = DTYPES[config["compute_dtype"]]
        self.plain = build()
        for micro in range(micro_steps):
            for each in range(size):
                generator = torch.Generator().manual_seed(10 * micro + each)
                x = torch.randn(3, 64, generator=generator)
                (self.plain(x).square().mean() / size).backward()
                if each == rank:
                    loss = self.model(x.to(self.dtype)).float().square().mean()
                    self.optimizer.scale(loss).backward()

    def close(self) -> None:
        self.runtime.close()


def values(like: torch.Tensor, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return (made / 16).to(dtype).to(torch.float32)


def check_getters(rig: Rig) -> None:
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-7} if rig.dtype is torch.float32 else {"rtol": 0.1, "atol": 0.02}
    )
    for param, plain in zip(rig.params, rig.plain.parameters(), strict=True):
        # fp32 values of a model are kept in its masters to the bit.
        assert torch.equal(safe_get_full_fp32_param(param), plain.detach())
        gradient = safe_get_full_grad(param)
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, plain.grad, **tolerance)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(safe_get_full_optimizer_state(param, key), torch.zeros(param.shape))


def norm(rig: Rig) -> float:
    gradients = [safe_get_full_grad(param) for param in rig.params]
    return torch.cat([g.flatten() for g in gradients]).double().norm().item()


def check_set_values_are_used(rig: Rig, *, local: bool) -> None:
    """Everything is set, and a step taken: torch's fused AdamW in fp32 does the same."""
    expected = []
    for index, param in enumerate(rig.params):
        master, average = values(param, index), values(param, 10 + index)
        squares, gradient = values(param, 20 + index).square(), values(param, 30 + index, rig.dtype)
        if local:
            mine = slice(local_range(param).start, local_range(param).stop)
            safe_set_local_fp32_param(param, master.flatten()[mine])
            safe_set_local_optimizer_state(param, average.flatten()[mine], "exp_avg")
            safe_set_local_optimizer_state(param, squares.flatten()[mine], "exp_avg_sq")
            safe_set_local_grad(param, gradient.flatten()[mine])
        else:
            safe_set_full_fp32_param(param, master)
            safe_set_full_optimizer_state(param, average, "exp_avg")
            safe_set_full_optimizer_state(param, squares, "exp_avg_sq")
            safe_set_full_grad(param, gradient)
        assert torch.equal(safe_get_full_fp32_param(param), master)
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), average)
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg_sq"), squares)
        assert torch.equal(safe_get_full_grad(param), gradient)
        torch.testing.assert_close(full_param(param).float(), master, rtol=1e-2, atol=1e-3)
        plain = nn.Parameter(master.clone())
        plain.grad = gradient
        expected.append((plain, average, squares))
    assert rig.optimizer.grad_norm() == pytest.approx(norm(rig), rel=1e-6)
    theirs = torch.optim.AdamW([plain for plain, _, _ in expected], lr=LR, fused=True)
    for plain, average, squares in expected:
        step = torch.tensor(0.0)
        theirs.state[plain] = {"step": step, "exp_avg": average, "exp_avg_sq": squares}
    rig.optimizer.step()
    theirs.step()
    for param, (plain, average, squares) in zip(rig.params, expected, strict=True):
        assert torch.equal(safe_get_full_fp32_param(param), plain.detach())
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), average)
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg_sq"), squares)
        assert safe_get_full_grad(param) is None
        assert safe_get_local_grad(param) is None


def check_local_parts(rig: Rig) -> list[tuple[int, int]]:
    ranges = []
    for param in rig.params:
        mine = local_range(param)
        ranges.append((mine.start, mine.stop))
        pairs = [
            (safe_get_local_fp32_param(param), safe_get_full_fp32_param(param)),
            (safe_get_local_grad(param), safe_get_full_grad(param)),
            *(
                (safe_get_local_optimizer_state(param, k), safe_get_full_optimizer_state(param, k))
                for k in ("exp_avg", "exp_avg_sq")
            ),
        ]
        for part, whole in pairs:
            assert torch.equal(part, whole.flatten()[mine.start : mine.stop])
    return ranges


def work(rank: int, size: int, every: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    ranges = []
    for number, config in enumerate(every):
        rig = Rig(rank, size, config)
        check_getters(rig)
        ranges.append(check_local_parts(rig))
        check_set_values_are_used(rig, local=(number + number // 4) % 2 == 0)
        check_set_values_after_a_step(rig)
        rig.close()
    return ranges


def check_set_values_after_a_step(rig: Rig) -> None:
    """A pending update is applied before anything is set."""
    param = rig.params[0]
    value = values(param, 50)
    safe_set_full_grad(param, values(param, 51, rig.dtype))
    rig.optimizer.step()
    safe_set_full_optimizer_state(param, value, "exp_avg")
    safe_set_full_fp32_param(param, value)
    assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), value)
    assert torch.equal(safe_get_full_fp32_param(param), value)


@pytest.mark.parametrize("stages", [(0, 1), (2, 3)])
@pytest.mark.parametrize("size", [1, 2])
def test_values_are_plain_torchs(size: int, stages: tuple[int, ...], tmp_path: Any) -> None:
    every = configs(str(tmp_path), stages)
    by_rank = run_ranks(work, size, every, timeout_s=120)
    shapes = [p.numel() for p in build().parameters()]
    for config, ranges in zip(every, zip(*by_rank, strict=True), strict=True):
        for number, numel in enumerate(shapes):
            parts = sorted(own[number] for own in ranges)
            if config["stage"] == 0:
                assert parts == [(0, numel)] * size
            else:
                owned = [element for start, stop in parts for element in range(start, stop)]
                assert owned == list(range(numel))


def set_between_micro_steps(rank: int, size: int, every: list[dict[str, Any]]) -> None:
    """Backwards after it add to what was set, also to what no_sync() has not reduced yet."""
    x = torch.ones(2, 64)
    for config in every:
        rig = Rig(rank, size, config, micro_steps=1)
        param, last = rig.params[0], rig.params[2]
        with tiermem.no_sync(rig.model):
            rig.model(x).square().mean().backward()
        safe_set_full_grad(param, torch.zeros(param.shape))
        before = safe_get_full_grad(last)
        rig.model(x).square().mean().backward()
        rig.plain.zero_grad()
        rig.plain(x).square().mean().backward()
        added = [p.grad for p in rig.plain.parameters()]
        torch.testing.assert_close(safe_get_full_grad(param), added[0])
        torch.testing.assert_close(safe_get_full_grad(last), before + added[2])
        assert rig.optimizer.grad_norm() == pytest.approx(norm(rig), rel=1e-6)
        rig.close()


@pytest.mark.parametrize("size", [1, 2])
def test_set_gradients_are_added_to(size: int, tmp_path: Any) -> None:
    every = configs(str(tmp_path), (0, 3))[::4]
    run_ranks(set_between_micro_steps, size, every, timeout_s=60)


def of_dtensors(rank: int, size: int) -> None:
    """Whole values are DTensors, or ordinary ones of their shape; local parts are of the own part."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    with tiermem.Runtime({"device": "cpu", "host_memory": "32MiB", "compute_dtype": "bf16"}) as runtime:
        tiermem.shard(model, runtime, mesh=mesh["dp"])
        tiermem.optim.AdamW(model.parameters())
        param = model[0].weight
        value = values(param, 1)
        own = value[rank * 96 // size : (rank + 1) * 96 // size].flatten()
        getters = {
            safe_set_full_fp32_param: (safe_get_full_fp32_param, safe_get_local_fp32_param),
            safe_set_full_grad: (safe_get_full_grad, safe_get_local_grad),
        }
        for setter, (whole, local) in getters.items():
            setter(param, value.to(torch.bfloat16))
            kept = whole(param).full_tensor()
            assert torch.equal(kept, value.to(torch.bfloat16).float())
            assert torch.equal(local(param), own.to(torch.bfloat16).float())
        safe_set_local_fp32_param(param, own)
        assert torch.equal(safe_get_full_fp32_param(param).full_tensor(), value)
        safe_set_full_optimizer_state(param, whole_fp32 := safe_get_full_fp32_param(param), "exp_avg")
        assert torch.equal(safe_get_local_optimizer_state(param, "exp_avg"), own)
        assert isinstance(whole_fp32, DTensor)


def test_dtensors() -> None:
    run_ranks(of_dtensors, 2, timeout_s=60)


def test_a_clipped_gradient_that_is_set_is_not_clipped_again(tmp_path: Any) -> None:
    rig = Rig(0, 1, configs(str(tmp_path), (3,))[0])
    rig.optimizer.clip_grad_norm_(1e-3)
    assert norm(rig) == pytest.approx(1e-3, rel=1e-3)
    wanted = values(rig.params[0], 1)
    safe_set_full_grad(rig.params[0], wanted)
    assert torch.equal(safe_get_full_grad(rig.params[0]), wanted)
    assert rig.optimizer.grad_norm() == pytest.approx(norm(rig), rel=1e-6)
    rig.close()


def test_what_is_not_sharded_has_only_its_gradient() -> None:
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.full((3,), 2.0)
    assert safe_get_full_grad(plain) is plain.grad
    for found in (
        safe_get_full_fp32_param(plain),
        safe_get_full_optimizer_state(plain, "exp_avg"),
        safe_get_local_fp32_param(plain),
        safe_get_local_optimizer_state(plain, "exp_avg"),
    ):
        assert found is None
    with pytest.raises(StateError, match="not a sharded parameter"):
        safe_set_full_fp32_param(plain, torch.zeros(3))


def test_what_cannot_be_is_refused(tmp_path: Any) -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    config = {"device": "cpu", "host_memory": "32MiB"}
    with tiermem.Runtime(config) as runtime:
        frozen, bias, _ = tiermem.shard(model, runtime).parameters()
        assert safe_get_full_optimizer_state(bias, "exp_avg") is None  # no optimizer
        tiermem.optim.AdamW(model.parameters())
        assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
        assert safe_get_full_grad(bias) is None
        with pytest.raises(StateError, match="frozen"):
            safe_set_full_grad(frozen, torch.zeros(frozen.shape))
        with pytest.raises(StateError, match="no state 'momentum'; it has: exp_avg, exp_avg_sq"):
            safe_get_full_optimizer_state(bias, "momentum")
        with pytest.raises(StateError, match=r"shape \(3,\) does not fit '0.bias' \(96,\)"):
            safe_set_full_grad(bias, torch.zeros(3))
        with pytest.raises(StateError, match="3 elements do not fit this rank's part"):
            safe_set_local_grad(bias, torch.zeros(3))
    with tiermem.Runtime({**config, "update": "backward"}) as runtime:
        model = tiermem.shard(build(), runtime)
        tiermem.optim.AdamW(model.parameters())
        with pytest.raises(StateError, match="update: 'backward' has used it"):
            safe_set_full_grad(model[0].bias, torch.zeros(96))


MAKERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "SGD": ("momentum_buffer", lambda p: tiermem.optim.SGD(p, lr=0.1, momentum=0.9)),
    "AdamW8bit": ("exp_avg_sq", lambda p: tiermem.optim.AdamW8bit(p, lr=0.1)),
    "Tiered": ("sum", lambda p: tiermem.optim.Tiered(torch.optim.Adagrad, p, lr=0.1)),
}


def states_of_others(rank: int, size: int, kind: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    key, make = MAKERS[kind]
    with tiermem.Runtime({"device": "cpu", "host_memory": "16MiB", "pin_memory": False}) as runtime:
        model = tiermem.shard(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)), runtime)
        optimizer = make(model.parameters())
        if kind == "Tiered":  # which makes its states in the first update
            with pytest.raises(StateError, match=r"makes the state of '0\.weight'"):
                tiermem.safe_set_full_optimizer_state(model[0].weight, torch.ones(96, 64), key)
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for step in range(2):
            for param in model.parameters():
                value = torch.full(param.shape, 0.5 + step)  # the largest of a block is kept exactly
                if step == 0:
                    tiermem.safe_set_full_optimizer_state(param, value, key)
                else:
                    local = tiermem.safe_get_local_optimizer_state(param, key)
                    assert local is not None
                    part = torch.full(local.shape, 0.5 + step)
                    tiermem.safe_set_local_optimizer_state(param, part, key)
                found = tiermem.safe_get_full_optimizer_state(param, key)
                assert found is not None
                assert torch.equal(found, value)
        before = [tiermem.full_param(p) for p in model.parameters()]
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        assert not all(map(torch.equal, before, [tiermem.full_param(p) for p in model.parameters()]))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_states_of_every_optimizer(kind: str, size: int) -> None:
    run_ranks(states_of_others, size, kind)


def test_momentum_that_is_set_first_is_used() -> None:
    config = {"device": "cpu", "host_memory": "16MiB", "persistence_threshold_numel": 0}
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(build(), runtime)
        optimizer = tiermem.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        weight = model[0].weight
        before = full_param(weight)
        safe_set_full_optimizer_state(weight, torch.ones(weight.shape), "momentum_buffer")
        safe_set_full_grad(weight, torch.zeros(weight.shape))
        optimizer.step()
        assert torch.equal(full_param(weight), before - 0.5)


def test_a_gradient_that_is_set_needs_no_scaled_loss() -> None:
    config = {"device": "cpu", "host_memory": "16MiB", "compute_dtype": "fp16"}
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(build(), runtime)
        optimizer = tiermem.optim.SGD(model.parameters(), lr=1.0)
        before = safe_get_full_fp32_param(model[0].weight)
        assert before is not None
        safe_set_full_grad(model[0].weight, torch.full((96, 64), 0.25))
        optimizer.step()
        after = safe_get_full_fp32_param(model[0].weight)
        assert after is not None
        assert torch.equal(after, before - 0.25)


@pytest.mark.parametrize("value", [None, 0.5, torch.zeros(96, 64, dtype=torch.complex64)])
def test_what_is_no_tensor_of_real_numbers(value: Any) -> None:
    with tiermem.Runtime({"device": "cpu", "host_memory": "16MiB"}) as runtime:
        model = tiermem.shard(build(), runtime)
        tiermem.optim.AdamW(model.parameters())
        weight = model[0].weight
        for call in (
            lambda: safe_set_full_fp32_param(weight, value),
            lambda: safe_set_full_grad(weight, value),
            lambda: safe_set_full_optimizer_state(weight, value, "exp_avg"),
        ):
            with pytest.raises(StateError, match="a tensor of real numbers, not"):
                call()
        with pytest.raises(StateError, match="is not a sharded parameter"):
            full_param(value)
