"""Models that share a submodule: sharded together they train as the plain ones do; one after the other
the second is refused, on all ranks, with what is shared and what to do, and nothing has changed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from zero_models import Plain, loss_of
from zero_ranks import CaseRunner, Cases, at_sizes, average, changes_of, make_twins
from zero_twins import batch

import tiermem
from tiermem.errors import StateError


class Two(nn.Module):
    """An actor and a critic over one encoder (blocks and embedding)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = Plain()
        self.critic = Plain()
        self.critic.embedding = self.actor.embedding
        self.critic.blocks[1] = self.actor.blocks[1]
        self.critic.blocks[2] = self.actor.blocks[2]


def together(path: str, stage: int) -> None:
    """One `shard` of a module that has both; each is called by itself, in turn and in one loss."""

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return loss_of(model.actor, tokens) + loss_of(model.critic, tokens.flip(0)) * 0.5

    twins = make_twins(Two, path, **changes_of(stage))
    with twins.runtime:
        twins.step(0, loss)
        twins.step(1, lambda model, tokens: loss_of(model.actor, tokens))
        twins.step(2, lambda model, tokens: loss_of(model.critic, tokens))
        twins.step(3, loss)
        twins.check()


def one_after_the_other(path: str, stage: int) -> None:
    """Also on another runtime; the first model goes on training."""
    twins = make_twins(Plain, path, **{**changes_of(stage), "device_memory": "4MiB"})
    with twins.runtime as runtime:
        twins.step(0)
        second = Plain()
        second.blocks[1] = twins.model.blocks[1]
        second.head.weight = twins.model.head.weight
        before = list(second.parameters())
        with tiermem.Runtime(runtime.config) as other:
            for each in (runtime, other):
                with pytest.raises(
                    StateError, match=r"'blocks\.1\.norm\.weight' is sharded already"
                ) as no:
                    tiermem.shard(second, each)
                assert "Remedy" in str(no.value)
                assert "tiermem.shard(torch.nn.ModuleList([first, second]), runtime)" in str(no.value)
            assert other.groups == []
        assert all(a is b for a, b in zip(before, second.parameters(), strict=True))
        twins.step(1)
        twins.check()


def second_optimizer(path: str, stage: int) -> None:
    """Over one module: refused by the name of its unit, and the first goes on."""
    twins = make_twins(Plain, path, **changes_of(stage))
    with twins.runtime:
        twins.step(0)
        with pytest.raises(StateError, match=r"blocks\.2.*has an optimizer already.*Remedy"):
            tiermem.optim.AdamW(twins.model.blocks[2].parameters(), lr=1.0)
        twins.step(1)
        twins.check()


def used_by_a_plain_model(path: str, stage: int) -> None:
    """A sharded submodule inside a model that is not sharded itself, beside parameters of its own
    that torch's optimizer trains."""
    twins = make_twins(Plain, path, **changes_of(stage))
    with twins.runtime:
        heads = [nn.Linear(64, 64), nn.Linear(64, 64)]
        heads[1].load_state_dict(heads[0].state_dict())
        theirs = [torch.optim.AdamW(head.parameters(), lr=1e-2, fused=True) for head in heads]
        for step in range(3):
            for (model, optimizer), head, own in zip(twins.both, heads, theirs, strict=True):
                whole = nn.Sequential(model, head)
                whole(twins.batch(step)).square().mean().backward()
                average(head)
                own.step()
                own.zero_grad()
                twins.update(model, optimizer)
        twins.check()
        for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
            assert torch.equal(a, b)


def two_runtimes(path: str, stage: int) -> None:
    """Two models on two runtimes in one graph, where one uses what the other gives."""
    first = make_twins(Plain, path, **changes_of(stage))
    with first.runtime:
        second = make_twins(Plain, path, update="deferred", **changes_of(stage))
        with second.runtime:
            for step in range(3):
                pairs = zip(first.both, second.both, strict=True)
                for (one, its), (other, their) in pairs:
                    hidden = other.blocks[0](one.encode(first.batch(step)))
                    (hidden.square().mean() + loss_of(other, batch(step))).backward()
                    first.update(one, its)
                    second.update(other, their)
            first.check()
            second.check()


ACTS = (together, one_after_the_other, second_optimizer, used_by_a_plain_model, two_runtimes)
CASES: Cases = {
    f"{act.__name__}, stage {stage}": functools.partial(act, stage=stage)
    for act in ACTS
    for stage in (3, 2)
}


@pytest.mark.parametrize(("name", "size"), at_sizes(CASES, lambda name: "stage 3" in name))
def test_shared_modules(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
