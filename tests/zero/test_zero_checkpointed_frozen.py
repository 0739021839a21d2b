"""Activation checkpointing, reentrant and not, of models whose layers are partly frozen: wherever the
frozen ones are, and whether or not what goes in has a gradient."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_models import Plain, Structure
from zero_ranks import CaseRunner, Cases, at_sizes, changes_of, make_twins

FROZEN: dict[str, tuple[int, ...]] = {
    "none": (),
    "before": (0, 1),
    "after": (2, 3),
    "between": (1, 2),
    "around": (0, 3),
    "in turn": (0, 2),
    "all": (0, 1, 2, 3),
}


class Checkpointed(Plain):
    """Each block is checkpointed; ``frozen`` ones do not train, and the embedding does not if the input
    is to have no gradient."""

    def __init__(self, reentrant: bool, frozen: tuple[int, ...], differentiable: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        for index in frozen:
            self.blocks[index].requires_grad_(False)
        self.embedding.requires_grad_(differentiable)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def train(
    path: str, reentrant: bool, frozen: tuple[int, ...], differentiable: bool, stage: int
) -> None:
    build: functools.partial[nn.Module] = functools.partial(
        Checkpointed, reentrant, frozen, differentiable
    )
    twins = make_twins(build, path, Structure(build), **changes_of(stage))
    with twins.runtime:
        twins.steps(3)
        twins.check()
        for index, block in enumerate(twins.model.blocks):
            trained = twins.optimizer.state.get(block.up.weight) is not None
            # A reentrant checkpoint none of whose inputs has a gradient gives none, as torch warns.
            cut = reentrant and not differentiable
            assert trained == (index not in frozen and not cut)


CASES: Cases = {
    f"{'reentrant' if reentrant else 'not reentrant'}, {name} frozen, "
    f"{'' if differentiable else 'no '}gradient in, stage {stage}": functools.partial(
        train, reentrant=reentrant, frozen=frozen, differentiable=differentiable, stage=stage
    )
    for reentrant, (name, frozen), differentiable, stage in itertools.product(
        (True, False), FROZEN.items(), (True, False), (3, 2)
    )
}


def in_short(name: str) -> bool:
    shown = ("between frozen, gradient" in name) or ("before frozen, no gradient" in name)
    return shown and name.endswith("stage 3")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "size"), at_sizes(CASES, in_short))
def test_checkpointed_and_frozen(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
