"""Gradient accumulation: sums are those of plain PyTorch, however gradients are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from training_rig import (
    MODEL,
    Recipe,
    Trained,
    batches,
    digest,
    make_model,
    run_steps,
    same_as_plain,
    sharded,
    tier_config,
    train,
)

import tiermem
from tiermem.models.reference import round_ties_away

Drives = Callable[[int], list[str]]

HOW: dict[str, dict[str, Any]] = {
    "kept": {"host_memory": 32 << 20},
    "kept-nvme": {"params": "nvme", "optimizer": "nvme", "host_memory": 32 << 20},
    "spilled": {
        "params": "nvme",
        "optimizer": "nvme",
        "host_memory": 2_500_000,
        "resident_memory": 0,
    },
}


def config_of(how: str, declared: int | None, drives: Drives) -> dict[str, Any]:
    paths = drives(2) if "nvme" in HOW[how].values() else None
    return tier_config(**HOW[how], paths=paths, gradient_accumulation_steps=declared)


def assert_spills(runtime: tiermem.Runtime, expected: bool) -> None:
    assert any(group.gradient_record is not None for group in runtime.groups) is expected


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("micro_steps", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("how", HOW)
def test_fp32_is_bit_equal_to_torch(how: str, micro_steps: int, declared: bool, drives: Drives) -> None:
    recipe = Recipe("fp32", steps=3, micro_steps=micro_steps)
    same_as_plain(recipe, config_of(how, micro_steps if declared else None, drives))


def reference_bf16(recipe: Recipe) -> tuple[list[float], list[torch.Tensor]]:
    """bf16 micro-gradients summed in fp32, AdamW on fp32 masters, rounded back."""
    model = make_model(recipe.model)
    masters = [p.detach().clone() for p in model.parameters()]
    model.to(torch.bfloat16)
    params = list(model.parameters())

    def copy_back() -> None:
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(round_ties_away(master))

    copy_back()
    optimizer = torch.optim.AdamW(masters, fused=True, **recipe.options)
    data = iter(batches(recipe.steps * recipe.micro_steps))
    losses = []
    for _ in range(recipe.steps):
        sums: list[torch.Tensor] = [torch.zeros_like(m) for m in masters]
        for _ in range(recipe.micro_steps):
            loss = model(*next(data))
            (loss / recipe.micro_steps if recipe.micro_steps > 1 else loss).backward()
            losses.append(float(loss.detach()))
            for total, param in zip(sums, params, strict=True):
                assert param.grad is not None
                total += param.grad.float()
                param.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        optimizer.step()
        copy_back()
    return losses, masters


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("micro_steps", [1, 2, 4])
@pytest.mark.parametrize("how", HOW)
def test_bf16_equals_fp32_sums_of_bf16_gradients(
    how: str, micro_steps: int, declared: bool, drives: Drives
) -> None:
    recipe = Recipe("bf16", steps=3, micro_steps=micro_steps)
    losses, masters = reference_bf16(recipe)
    config = config_of(how, micro_steps if declared else None, drives)
    with sharded(config, recipe) as (_, model, optimizer):
        assert run_steps(model, optimizer, recipe) == losses
        for param, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(tiermem.full_master(param), master)


@pytest.mark.parametrize("declared", [4, None])
def test_the_small_budget_really_spills_and_the_large_one_does_not(
    declared: int | None, drives: Drives
) -> None:
    for how, spills in (("spilled", True), ("kept-nvme", False), ("kept", False)):
        with sharded(config_of(how, declared, drives), Recipe()) as (runtime, _, _):
            assert_spills(runtime, spills)


def test_more_micro_steps_than_declared_give_the_same_bits_or_say_so(drives: Drives) -> None:
    """One was declared; a loop that accumulates anyway must not lose anything."""
    recipe = Recipe("bf16", steps=2, micro_steps=2)
    expected = reference_bf16(recipe)[0]
    for how in HOW:
        try:
            got: Trained = train(config_of(how, 1, drives), recipe)
        except tiermem.errors.BudgetError as error:
            assert "gradient_accumulation_steps" in str(error)
        else:
            assert list(got.losses) == expected


@pytest.mark.parametrize("how", HOW)
def test_full_grad_is_the_sum_so_far(how: str, drives: Drives) -> None:
    reference = make_model()
    with sharded({**config_of(how, None, drives), "compute_dtype": "fp32"}, Recipe("fp32")) as (
        _,
        model,
        _,
    ):
        for tokens, targets in batches(3):
            reference(tokens, targets).backward()
            model(tokens, targets).backward()
            for theirs, ours in zip(reference.parameters(), model.parameters(), strict=True):
                mine = tiermem.full_grad(ours)
                assert mine is not None
                assert theirs.grad is not None
                assert torch.equal(mine, theirs.grad)


@pytest.mark.parametrize("how", HOW)
def test_zero_grad_between_micro_steps_forgets(how: str, drives: Drives) -> None:
    recipe = Recipe("bf16", steps=1)
    expected = train(tier_config(), recipe).digest
    with sharded(config_of(how, None, drives), recipe) as (_, model, optimizer):
        for batch in batches(2, seed=5):
            model(*batch).backward()
        optimizer.zero_grad()
        losses = run_steps(model, optimizer, recipe)
        assert digest(losses, model, optimizer) == expected


def test_steps_with_different_numbers_of_micro_steps(drives: Drives) -> None:
    """Buffers widen for one step and narrow again for the next."""
    numbers = [1, 3, 1, 2]
    data = batches(sum(numbers))

    def run(config: dict[str, Any]) -> dict[str, torch.Tensor]:
        with sharded(config, Recipe()) as (_, model, optimizer):
            left = iter(data)
            for number in numbers:
                for _ in range(number):
                    model(*next(left)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return {name: tiermem.full_master(p) for name, p in model.named_parameters()}

    expected = run(tier_config())
    for how in HOW:
        got = run(config_of(how, None, drives))
        assert all(torch.equal(got[name], expected[name]) for name in expected), how


def test_the_model_is_the_size_that_the_budgets_here_assume() -> None:
    assert MODEL.num_parameters == 134_912
