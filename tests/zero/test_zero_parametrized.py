"""Weights that are computed from parameters in every forward: torch's parametrizations, its older norms
in hooks, and pruning; in training and in evaluation, where some keep statistics."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from zero_models import Plain
from zero_ranks import CaseRunner, Cases, at_sizes, changes_of, make_twins

APPLIED: dict[str, Callable[[nn.Module], object]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight norm by hook": nn.utils.weight_norm,
    "spectral norm by hook": nn.utils.spectral_norm,
    "pruned": functools.partial(prune.random_unstructured, name="weight", amount=0.3),
}


class Computed(Plain):
    def __init__(self, how: str) -> None:
        super().__init__()
        for block in self.blocks[:2]:
            APPLIED[how](block.up)


def train(path: str, how: str, stage: int) -> None:
    build = functools.partial(Computed, how)
    # An orthogonal weight is a chain of functions of one parameter, which its graph keeps.
    options = {**changes_of(stage), "device_memory": "2MiB"}
    twins = make_twins(build, path, **options)
    with twins.runtime:
        for step in range(2):
            twins.step(step)
            outputs = []
            for model, _ in twins.both:
                model.eval()
                with torch.no_grad():
                    outputs.append(model(twins.batch(step)))
                model.train()
            assert torch.equal(*outputs)
        twins.check()


CASES: Cases = {
    f"{how}, stage {stage}": functools.partial(train, how=how, stage=stage)
    for how, stage in itertools.product(APPLIED, (3, 2))
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize(
    ("name", "size"), at_sizes(CASES, lambda name: name.startswith("spectral") and "stage 3" in name)
)
def test_computed_weights(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
