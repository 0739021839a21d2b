"""Mixtures of experts, packed into one parameter or modules of their own, chosen alike on all ranks or
not: training is exact, or ends in seconds with the name of the module that not all ranks use."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from zero_models import WIDTH, Plain, Structure
from zero_ranks import CaseRunner, Cases, at_sizes, changes_of, make_twins, my_rank, world_size

from tiermem.errors import StateError

EXPERTS = 4


class Packed(nn.Module):
    """All experts in one [experts, in, out] parameter: a token goes to one of them by an index of
    it, and to the mean of all by a batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        share, chosen = self.gate(flat).softmax(-1).max(-1)
        mixed = torch.zeros_like(flat)
        for expert in range(EXPERTS):
            mine = (chosen == expert).nonzero().squeeze(-1)
            hidden = functional.gelu(flat[mine] @ self.up[expert])
            mixed = mixed.index_add(0, mine, hidden @ self.down[expert])
        every = torch.bmm(functional.gelu(torch.bmm(flat.expand(EXPERTS, -1, -1), self.up)), self.down)
        return x + (mixed * share[:, None] + every.mean(0)).view_as(x)


class Chosen(nn.Module):
    """Experts that are modules; those that no token of this rank goes to are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x.mean((0, 1))).softmax(-1)
        for expert in self.choose():
            x = x + self.experts[expert](x) * weights[expert]
        return x

    def choose(self) -> list[int]:
        return [0, 1 + my_rank()]


class InTurn(Chosen):
    """Each time others, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def choose(self) -> list[int]:
        self.calls += 1
        first = (self.calls + 3 * my_rank()) % EXPERTS
        return [first, (first + 1) % EXPERTS]


class Mixture(Plain):
    """Two blocks with experts between others without."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks[1] = kind()
        self.blocks[3] = kind()


def exact(path: str, kind: type[nn.Module], stage: int, wrap: list[type[nn.Module]] | None) -> None:
    build = functools.partial(Mixture, kind)
    structure = Structure(build, wrap=lambda model: wrap)
    twins = make_twins(build, path, structure, **{"device_memory": "2MiB", **changes_of(stage)})
    with twins.runtime:
        twins.steps(3)
        twins.check()


def apart(path: str, kind: type[nn.Module]) -> None:
    """Each expert is a unit of its own: a gather of one needs all ranks. Alone it is exact."""
    build = functools.partial(Mixture, kind)
    twins = make_twins(build, path, Structure(build, wrap=lambda model: [nn.Linear]), stage=3)
    if world_size() == 1:
        with twins.runtime:
            twins.steps(3)
            twins.check()
        return
    with (
        pytest.raises(StateError, match="ranks disagree about what comes next") as refused,
        twins.runtime,
    ):
        twins.steps(3)
    assert re.search(r"'blocks\.1\.experts\.\d'", str(refused.value)), str(refused.value)
    assert "wrap=[its class, ...]" in str(refused.value)


CASES: Cases = {
    **{
        f"{kind.__name__.lower()}, {unit}, stage {stage}": functools.partial(
            exact, kind=kind, stage=stage, wrap=wrap
        )
        for kind in (Packed, Chosen, InTurn)
        for unit, wrap in (("blocks", None), ("experts", [kind]))
        for stage in (3, 2)
    },
    "chosen, each a unit": functools.partial(apart, kind=Chosen),
    "in turn, each a unit": functools.partial(apart, kind=InTurn),
}


IN_SHORT = (
    "packed, blocks, stage 3",
    "chosen, blocks, stage 3",
    "in turn, experts, stage 3",
    "chosen, each a unit",
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("name", "size"), at_sizes(CASES, IN_SHORT.__contains__))
def test_experts(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
