"""A module or parameter that takes the place of a sharded one, such as a larger embedding, is never
left untrained without a word: the backward that gives it a gradient says what to do, which works."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from zero_models import VOCABULARY, WIDTH, Block, Plain, Tied, loss_of
from zero_ranks import CaseRunner, Cases, RankTwins, at_sizes, changes_of, make_twins

import tiermem
from tiermem.errors import StateError

MORE = VOCABULARY + 16

Change = Callable[[nn.Module], None]


def enlarge_embedding(model: nn.Module) -> None:
    """Copies the rows that there are, as people do to add tokens."""
    old, new = model.embedding, nn.Embedding(MORE, WIDTH)
    with torch.no_grad():
        new.weight[:VOCABULARY].copy_(old.weight)
    model.embedding = new


def enlarge_tied(model: nn.Module) -> None:
    enlarge_embedding(model)
    model.head.weight = model.embedding.weight


def enlarge_parameter(model: nn.Module) -> None:
    """Within the module that there was."""
    with torch.no_grad():
        rows = torch.cat([model.embedding.weight, torch.zeros(MORE - VOCABULARY, WIDTH)])
    model.embedding.weight = nn.Parameter(rows)


def replace_block(model: nn.Module) -> None:
    model.blocks[2] = Block()


CHANGES: dict[str, tuple[type[nn.Module], Change, str, str]] = {
    "embedding": (Plain, enlarge_embedding, "embedding.weight", "embedding"),
    "tied embedding": (Tied, enlarge_tied, "embedding.weight", "embedding"),
    "parameter": (Plain, enlarge_parameter, "embedding.weight", ""),
    "block": (Plain, replace_block, "blocks.2.up.weight", "blocks.2"),
}


def change_both(twins: RankTwins, change: Change) -> None:
    for model, _ in twins.both:
        torch.manual_seed(5)
        change(model)


def refused(path: str, stage: int, change: str, mode: str = "deferred") -> None:
    build, act, parameter, module = CHANGES[change]
    twins = make_twins(build, path, update=mode, **changes_of(stage))
    with twins.runtime:
        twins.step(0)
        change_both(twins, act)
        loss = loss_of(twins.model, twins.batch(1))
        with pytest.raises(StateError, match=f"'{parameter}' was sharded.*Remedy") as no:
            loss.backward()
        assert (f"get_submodule('{module}')" in str(no.value)) == bool(module)


def sharded_too(path: str, stage: int, change: str) -> None:
    """What the refusal says is done, before and after it was raised."""
    build, act, _, module = CHANGES[change]
    for step_between in (False, True):
        twins = make_twins(build, path, **{**changes_of(stage), "device_memory": "4MiB"})
        with twins.runtime:
            twins.step(0)
            change_both(twins, act)
            if step_between:
                with pytest.raises(StateError, match="Remedy"):
                    loss_of(twins.model, twins.batch(1)).backward()
                twins.model.zero_grad()
            tiermem.shard(twins.model.get_submodule(module), twins.runtime)
            for model, optimizer in twins.both:
                optimizer.add_param_group({"params": model.get_submodule(module).parameters()})
            for step in (1, 2):
                twins.step(step)
            twins.check()


def optimizer_made_afterwards(path: str, stage: int) -> None:
    """It is given a parameter that is not sharded, and says so."""
    twins = make_twins(Plain, path, **{**changes_of(stage), "device_memory": "4MiB"})
    with twins.runtime as runtime:
        model = tiermem.shard(Plain(), runtime)
        enlarge_embedding(model)
        with pytest.raises(StateError, match=rf"\({MORE}, {WIDTH}\).*is sharded by itself first"):
            tiermem.optim.AdamW(model.parameters())
        tiermem.shard(model.embedding, runtime)
        tiermem.optim.AdamW(model.parameters())


def frozen(path: str, stage: int) -> None:
    """What is not to be trained may be put anywhere."""
    twins = make_twins(Plain, path, **changes_of(stage))
    with twins.runtime:
        twins.step(0)
        change_both(twins, enlarge_embedding)
        for model, _ in twins.both:
            model.embedding.requires_grad_(False)
        twins.steps(2, first=1)
        assert [a for a, _ in twins.losses] == [b for _, b in twins.losses]


def dropped(path: str, stage: int) -> None:
    """Layers may go, and others may wrap them."""
    twins = make_twins(Plain, path, **changes_of(stage))
    with twins.runtime:
        twins.step(0)
        for model, _ in twins.both:
            del model.blocks[3]
            model.blocks[0] = nn.Sequential(model.blocks[0], nn.Dropout(0.0))
        twins.steps(2, first=1)
        assert [a for a, _ in twins.losses] == [b for _, b in twins.losses]


CASES: Cases = {
    **{
        f"{change}, refused, stage {stage}": functools.partial(refused, change=change, stage=stage)
        for change in CHANGES
        for stage in (3, 2)
    },
    "embedding, refused, in backward, stage 3": functools.partial(
        refused, change="embedding", stage=3, mode="backward"
    ),
    **{
        f"{change}, sharded too, stage {stage}": functools.partial(
            sharded_too, change=change, stage=stage
        )
        for change in ("embedding", "block")
        for stage in (3, 2)
    },
    **{
        f"{act.__name__}, stage {stage}": functools.partial(act, stage=stage)
        for act in (optimizer_made_afterwards, frozen, dropped)
        for stage in (3, 2)
    },
}


IN_SHORT = ("embedding, refused, stage 3", "block, refused, stage 3", "embedding, sharded too, stage 3")


@pytest.mark.parametrize(("name", "size"), at_sizes(CASES, IN_SHORT.__contains__))
def test_replaced(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
