"""Losses, parameters, masters and moments are the same bits wherever states lie and however they
are moved."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from training_rig import Recipe, Trained, tier_config, train

import tiermem.zero.runtime
from tiermem.errors import BudgetError
from tiermem.kernels import available_kernels, open_kernels

Drives = Callable[[int], list[str]]

RECIPES = {
    "bf16": Recipe("bf16"),
    "fp32": Recipe("fp32"),
    "bf16-clip": Recipe("bf16", clip=0.5, schedule=True),
    "bf16-micro": Recipe("bf16", steps=3, micro_steps=2),
}

# The first choice of each axis is the usual one.
AXES: dict[str, tuple[Any, ...]] = {
    "params": ("nvme", "host", "device"),
    "optimizer": ("nvme", "host", "device"),
    # What is measured by the runtime itself is different every time.
    "weights": ((1.0,), (1.0, 2.5), (3.0, 1.0, 0.5), (0.02, 1.0, 30.0), "measured"),
    "stripe_bytes": (1 << 20, 64 << 10, 4096),
    "host_extra": (32 << 20, 0, 4096, 100_000, 1_500_000),  # above the smallest budget
    "resident_memory": (None, 0, 150_000),
    "prefetch_bytes": (None, 0, 70_000, 8 << 20),
    "sub_group_numel": (None, 4096, 5000, 12_345, 1 << 20),
    "update": ("deferred", "backward"),
    "backend": ("auto", "libaio", "io_uring", "native_threads", "threads"),
    "chunk_bytes": (1 << 20, 4096),
    "pin_memory": (False, True),
    "kernels": ("auto", *available_kernels()),
}

Choice = dict[str, Any]


def all_pairs(axes: Mapping[str, Iterable[Any]], seed: int = 0) -> list[Choice]:
    """A small sample in which every pair of choices of two axes occurs at least once."""
    rng = random.Random(seed)
    names = list(axes)
    values = {name: list(axes[name]) for name in names}

    def pairs(choice: Choice) -> set[Any]:
        return {((a, choice[a]), (b, choice[b])) for a, b in itertools.combinations(names, 2)}

    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in values[a]
        for y in values[b]
    }
    sample = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        tries = [{name: rng.choice(values[name]) for name in names} | {a: x, b: y} for _ in range(60)]
        best = max(tries, key=lambda choice: len(pairs(choice) & missing))
        missing -= pairs(best)
        sample.append(best)
    return sample


def one_at_a_time() -> list[Choice]:
    usual = {name: values[0] for name, values in AXES.items()}
    return [usual | {name: value} for name, values in AXES.items() for value in values[1:]]


def name_of(choice: Choice) -> str:
    changed = {k: v for k, v in choice.items() if v != AXES[k][0]}
    return re.sub(r"[^\w.=,-]+", "", ",".join(f"{k}={v}" for k, v in changed.items())) or "usual"


def smallest_host_memory(config: dict[str, Any], recipe: Recipe) -> int:
    """The smallest budget that the refusal of a tiny one names."""
    with pytest.raises(BudgetError) as refused:
        train({**config, "host_memory": 4096}, recipe)
    found = re.search(r"smallest that works.*?\((\d+) bytes\)", str(refused.value))
    assert found, refused.value
    return int(found[1])


def run(choice: Choice, recipe: Recipe, drives: Drives) -> Trained:
    measured = choice["weights"] == "measured"
    config = tier_config(
        params=choice["params"],
        optimizer=choice["optimizer"],
        paths=drives(2 if measured else len(choice["weights"])),
        path_weights=None if measured else choice["weights"],
        stripe_bytes=choice["stripe_bytes"],
        resident_memory=choice["resident_memory"],
        prefetch_bytes=choice["prefetch_bytes"],
        sub_group_numel=choice["sub_group_numel"],
        update=choice["update"],
        pin_memory=choice["pin_memory"],
        io={"backend": choice["backend"], "chunk_bytes": choice["chunk_bytes"]},
        gradient_accumulation_steps=recipe.micro_steps if recipe.micro_steps > 1 else None,
        compute_dtype=recipe.dtype,
    )
    config["host_memory"] = smallest_host_memory(config, recipe) + choice["host_extra"]
    with pytest.MonkeyPatch.context() as patch:
        chosen = functools.partial(open_kernels, choice["kernels"])
        patch.setattr(tiermem.zero.runtime, "open_kernels", chosen)
        return train(config, recipe)


@pytest.fixture(scope="module")
def expected() -> Callable[[str], Trained]:
    """Everything in host memory, the default settings."""
    cache: dict[str, Trained] = {}

    def get(name: str) -> Trained:
        if name not in cache:
            recipe = RECIPES[name]
            cache[name] = train(tier_config(gradient_accumulation_steps=recipe.micro_steps), recipe)
        return cache[name]

    return get


def check(choice: Choice, name: str, expected: Callable[[str], Trained], drives: Drives) -> None:
    if choice["update"] == "backward" and (RECIPES[name].clip or RECIPES[name].micro_steps > 1):
        choice = choice | {"update": "deferred"}
    got = run(choice, RECIPES[name], drives)
    assert got.losses == expected(name).losses
    assert got.digest == expected(name).digest


SAMPLE = all_pairs(AXES)
SOONER = 18  # the first few have most of the pairs


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] if n >= SOONER else []) for n in range(len(SAMPLE))],
)
def test_every_pair_of_settings_gives_the_same_bits(
    number: int, expected: Callable[[str], Trained], drives: Drives
) -> None:
    """The kinds of training take turns."""
    check(SAMPLE[number], list(RECIPES)[number % len(RECIPES)], expected, drives)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("choice", one_at_a_time(), ids=name_of)
def test_every_setting_by_itself_gives_the_same_bits(
    choice: Choice, recipe: str, expected: Callable[[str], Trained], drives: Drives
) -> None:
    check(choice, recipe, expected, drives)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("params", "optimizer"), list(itertools.product(AXES["params"], AXES["optimizer"]))
)
def test_all_combinations_of_what_interacts_give_the_same_bits(
    params: str, optimizer: str, recipe: str, expected: Callable[[str], Trained], drives: Drives
) -> None:
    usual = {name: values[0] for name, values in AXES.items()}
    for extra, resident, prefetch, update, sub_group in itertools.product(
        (0, 1_500_000),
        AXES["resident_memory"],
        (None, 0),
        AXES["update"],
        (None, 12_345),
    ):
        choice = usual | {
            "params": params,
            "optimizer": optimizer,
            "weights": AXES["weights"][2],
            "host_extra": extra,
            "resident_memory": resident,
            "prefetch_bytes": prefetch,
            "update": update,
            "sub_group_numel": sub_group,
            "stripe_bytes": 64 << 10,
        }
        check(choice, recipe, expected, drives)


def test_evaluation_and_inspection_between_steps_change_nothing(
    expected: Callable[[str], Trained], drives: Drives
) -> None:
    import torch
    from training_rig import batches, digest, run_steps, sharded

    import tiermem

    config = tier_config(
        params="nvme", optimizer="nvme", paths=drives(2), host_memory=4 << 20, resident_memory=0
    )
    recipe = RECIPES["bf16"]
    with sharded(config, recipe) as (runtime, model, optimizer):

        def look(step: int) -> None:
            if step % 3 == 0:
                model.eval()
                with torch.no_grad():
                    model(*batches(1, seed=99)[0])
                model.train()
            elif step % 3 == 1:
                tiermem.full_master(next(model.parameters()))
                optimizer.state_dict()["state"][3]["exp_avg"]
            else:
                runtime.drain()

        losses = run_steps(model, optimizer, recipe, on_step=look)
        assert digest(losses, model, optimizer) == expected("bf16").digest
