"""Running statistics are each rank's own, as in data parallel training that does not broadcast buffers,
and evaluation uses them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import distributed as dist
from torch import nn
from zero_models import Convolutions
from zero_ranks import CaseRunner, Cases, at_sizes, changes_of, make_twins, world_size


def evaluated_afterwards(path: str, stage: int) -> None:
    twins = make_twins(Convolutions, path, **changes_of(stage))
    with twins.runtime:
        for step in range(3):
            twins.step(step)
            outputs = []
            for model, _ in twins.both:
                model.eval()
                with torch.no_grad():
                    outputs.append(model(twins.batch(step)))
                model.train()
            assert torch.equal(*outputs)
        twins.check()  # buffers too
        assert not same_on_all_ranks(twins.model) or world_size() == 1


def first_ranks_at_first(path: str, stage: int) -> None:
    """Statistics that ranks have before are those of the first, as parameters are."""

    def build() -> nn.Module:
        model = Convolutions()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean)
        return model

    twins = make_twins(build, path, **changes_of(stage))
    with twins.runtime:
        assert same_on_all_ranks(twins.model)
        twins.step(0)
        twins.check()


def same_on_all_ranks(model: nn.Module) -> bool:
    mine = torch.cat([b.flatten().float() for n, b in model.named_buffers() if "running" in n])
    if world_size() == 1:
        return True
    every = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(mine, other) for other in every)


CASES: Cases = {
    f"{case.__name__}, stage {stage}": functools.partial(case, stage=stage)
    for case in (evaluated_afterwards, first_ranks_at_first)
    for stage in (3, 2)
}


@pytest.mark.parametrize(("name", "size"), at_sizes(CASES, lambda name: "stage 3" in name))
def test_running_statistics(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
