"""Several models, runtimes and optimizers in one process."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Plain, Tied, loss_of
from zero_twins import batch

import tiermem
from tiermem.errors import BudgetError, StateError


def test_two_runtimes(make_twins, make_runtime, tmp_path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    first = make_twins(runtime=make_runtime(paths=[paths[0]]))
    second = make_twins(Tied, runtime=make_runtime(paths=[paths[1]], update="backward"))
    for step in range(3):
        first.step(step)
        second.step(step + 5)
    first.check()
    second.check()


def test_two_runtimes_on_one_path(make_twins, make_runtime) -> None:
    first = make_twins(runtime=make_runtime())
    second = make_twins(Tied, runtime=make_runtime())
    for step in range(2):
        first.step(step)
        second.step(step + 5)
    first.check()
    second.check()


def test_models_of_two_runtimes_in_one_graph(make_twins, make_runtime) -> None:
    first, second = make_twins(runtime=make_runtime()), make_twins(runtime=make_runtime())
    for step in range(3):
        losses = [
            a(batch(step)).square().mean() * 0.5 + b.blocks[0](a.encode(batch(step))).mean()
            for a, b in ((first.plain, second.plain), (first.model, second.model))
        ]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
        for twins in (first, second):
            for _, optimizer in twins.both:
                optimizer.step()
                optimizer.zero_grad()
    first.check()
    second.check()


def test_a_runtime_after_another(make_twins, make_runtime) -> None:
    for _ in range(2):
        runtime = make_runtime()
        twins = make_twins(runtime=runtime)
        twins.steps(2)
        twins.check()
        runtime.close()


def test_two_models_on_one_runtime(make_twins, make_runtime) -> None:
    runtime = make_runtime(device_memory="320KiB")
    first = make_twins(runtime=runtime)
    second = make_twins(Tied, runtime=runtime)
    for step in range(3):
        first.step(step)
        second.step(step + 5)
    first.check()
    second.check()


def test_one_optimizer_over_two_models(make_runtime) -> None:
    def build():
        torch.manual_seed(7)
        return torch.nn.ModuleList([Plain(), Tied()])

    plain, models = build(), build()
    runtime = make_runtime(device_memory="320KiB")
    for model in models:
        tiermem.shard(model, runtime)
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        tiermem.optim.AdamW([*models[0].parameters(), *models[1].parameters()], lr=1e-2),
    ]
    for step in range(3):
        for each, optimizer in zip((plain, models), optimizers, strict=True):
            (loss_of(each[0], batch(step)) + loss_of(each[1], batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(
        plain.parameters(), [*models[0].parameters(), *models[1].parameters()], strict=True
    ):
        assert torch.equal(a, tiermem.full_param(b))


def test_two_optimizers_on_the_halves_of_one_model(make_runtime) -> None:
    torch.manual_seed(7)
    plain = Plain()
    torch.manual_seed(7)
    model = Plain()
    tiermem.shard(model, make_runtime())
    pairs = []
    for each, kind, extra in (
        (plain, torch.optim.AdamW, {"fused": True}),
        (model, tiermem.optim.AdamW, {}),
    ):
        body = [p for n, p in each.named_parameters() if n.startswith("blocks")]
        ends = [p for n, p in each.named_parameters() if not n.startswith("blocks")]
        pairs.append((each, [kind(body, lr=1e-2, **extra), kind(ends, lr=1e-3, **extra)]))
    for step in range(3):
        for each, optimizers in pairs:
            loss_of(each, batch(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, tiermem.full_param(b))


def test_param_groups_with_their_own_options(make_runtime) -> None:
    torch.manual_seed(7)
    plain = Plain()
    torch.manual_seed(7)
    model = Plain()
    tiermem.shard(model, make_runtime())

    def groups(each: torch.nn.Module) -> list[dict]:
        params = list(each.parameters())
        return [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in params if p.ndim == 1], "lr": 3e-3, "betas": (0.8, 0.95)},
        ]

    optimizers = [
        torch.optim.AdamW(groups(plain), lr=1e-2, fused=True),
        tiermem.optim.AdamW(groups(model), lr=1e-2),
    ]
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            loss_of(each, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, tiermem.full_param(b))


def test_sharding_twice_is_refused(twins) -> None:
    with pytest.raises(StateError, match="sharded already"):
        tiermem.shard(twins.model, twins.runtime)
    twins.steps(2)
    twins.check()


def test_a_gradient_at_sharding_is_refused(make_runtime) -> None:
    model = Plain()
    loss_of(model, batch(0)).backward()
    with pytest.raises(StateError, match="zero_grad"):
        tiermem.shard(model, make_runtime())


def test_optimizer_on_ordinary_parameters_is_refused() -> None:
    with pytest.raises(StateError, match=r"tiermem\.shard"):
        tiermem.optim.AdamW(Plain().parameters())


def test_optimizer_on_mixed_parameters_is_refused(make_runtime) -> None:
    model = tiermem.shard(Plain(), make_runtime())
    with pytest.raises(StateError, match="Remedy"):
        tiermem.optim.AdamW([*model.parameters(), *Plain().parameters()])


def test_torchs_optimizer_on_sharded_parameters_is_refused(make_runtime) -> None:
    """It must not train silently on nothing."""
    model = tiermem.shard(Plain(), make_runtime())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch(0)).backward()
    with pytest.raises((StateError, RuntimeError), match="Remedy"):
        optimizer.step()


def test_a_second_optimizer_on_the_same_parameters_is_refused(twins) -> None:
    with pytest.raises(StateError, match="has an optimizer already"):
        tiermem.optim.AdamW(twins.model.parameters())
    twins.steps(2)
    twins.check()


def test_a_second_model_without_room_names_the_budget_that_works(make_runtime) -> None:
    """Device memory was opened for the first one."""

    def build(width: int) -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])

    runtime = make_runtime(device_memory=None)
    tiermem.shard(build(64), runtime)
    larger = build(256)
    with pytest.raises(BudgetError, match="give device_memory") as refused:
        tiermem.shard(larger, runtime)
    assert all(type(p) is nn.Parameter for p in larger.parameters())  # nothing was changed
    smallest = int(re.findall(r"at least (\d+)", str(refused.value))[0])
    for memory, enough in ((smallest - 4096, False), (smallest, True)):
        runtime = make_runtime(device_memory=memory)
        tiermem.shard(build(64), runtime)
        if enough:
            model = tiermem.shard(build(256), runtime)
            model(torch.randn(2, 256)).sum().backward()
        else:
            with pytest.raises(BudgetError):
                tiermem.shard(build(256), runtime)


def test_several_threads_are_served_one_by_one_or_refused(make_twins) -> None:
    twins = make_twins()
    tokens = [batch(seed) for seed in range(4)]
    with torch.no_grad():
        expected = [twins.model(t).sum().item() for t in tokens]
    seen: set[str] = set()

    def evaluate(number: int) -> None:
        for _ in range(30):
            try:
                with torch.no_grad():
                    right = twins.model(tokens[number]).sum().item() == expected[number]
                seen.add("right" if right else "wrong")
            except StateError as error:
                seen.add(str(error)[:14])

    threads = [threading.Thread(target=evaluate, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "right" in seen
    assert seen <= {"right", "another thread"}
    twins.steps(2)
    twins.check()


def test_a_thread_may_take_over_when_another_has_ended(make_twins) -> None:
    twins = make_twins()
    for _ in range(2):
        thread = threading.Thread(target=twins.steps, args=(1,))
        thread.start()
        thread.join()
    twins.steps(1)
    twins.check()


def test_reading_one_parameter_costs_nothing_for_the_others() -> None:
    """Every way to go through the parameters of one unit touches each of them a few times, not each
    one for each."""

    class Many(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.each = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(count)])

    def attached(count: int) -> int:
        with tiermem.Runtime({"device": "cpu", "host_memory": "64MiB"}) as runtime:
            model = tiermem.shard(Many(count), runtime)
            calls = 0

            def counting(params: Any = None) -> None:
                nonlocal calls
                calls += len(group.params if params is None else params)
                attach(params)

            (group,) = runtime.groups
            attach = group.attach
            group.attach = counting  # type: ignore[method-assign]
            state = model.state_dict()
            model.load_state_dict(state)
            for param in model.parameters():
                param.sum()
                tiermem.full_master(param)
                tiermem.zero.safe_set_full_fp32_param(param, torch.ones(3))
            return calls

    assert attached(60) <= 2 * attached(30)
