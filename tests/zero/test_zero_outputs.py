"""Whatever containers forwards give and take, at every level, training is that of the plain model."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from zero_models import Block, Plain, Structure, loss_of
from zero_ranks import CaseRunner, Cases, at_sizes, changes_of, make_twins


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    note: str
    missing: torch.Tensor | None = None


class Opaque:
    """Not a container that torch knows."""

    __slots__ = ("parts",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.parts = [("hidden", hidden)]

    def __iter__(self) -> Any:
        return iter(value for _, value in self.parts)


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """As those of well-known libraries: attributes, keys and positions; None values are left out."""

    def __init__(self, **values: Any) -> None:
        super().__init__((k, v) for k, v in values.items() if v is not None)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else list(self.values())[key]


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "list": (lambda x: [x, None, 3], lambda out: out[0]),
    "tuple": (lambda x: (x * 2, x), lambda out: out[0] - out[1]),
    "dict": (lambda x: {"hidden": x, "note": "n", "none": None}, lambda out: out["hidden"]),
    "nested": (
        lambda x: {"all": [(x, {"deep": x * 3})], 1: "one"},
        lambda out: out["all"][0][1]["deep"],
    ),
    "dataclass": (lambda x: Record(x, "kept"), lambda out: out.hidden),
    "opaque": (Opaque, lambda out: next(iter(out))),
    "model output": (
        lambda x: ModelOutput(loss=None, hidden=x, states=(x, x * 0.5)),
        lambda out: out.hidden + out["states"][1] + out[0],
    ),
    "views": (lambda x: x.unbind(0), torch.stack),
    "generator": (lambda x: (part for part in x.split(2)), lambda out: torch.cat(list(out))),
    "detached beside": (lambda x: {"x": x, "seen": x.detach()}, lambda out: out["x"] + out["seen"]),
}


class Giving(Plain):
    """Blocks and the root give containers of a kind; the root takes one, by keyword."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.read = KINDS[kind]
        self.make = make
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: make(output))

    def forward(self, tokens: torch.Tensor, *, given: Any = None) -> Any:
        x = self.embedding(tokens)
        if given is not None:
            x = x + self.read(given)
        for block in self.blocks:
            x = self.read(block(x))
        return self.make(self.head(x))


class Silent(Plain):
    """Blocks give nothing at all: what they make is left in a list that they are given."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: 0)
            block.down.register_forward_hook(self._keep)
        self.kept: list[torch.Tensor] = []

    def _keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.kept.append(output)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            assert block(x) == 0
            x = x + self.kept.pop()
        return self.head(x)


class InParts(Block):
    """A forward that is a generator: its body runs after the call."""

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]
        y = self.norm(x)
        yield y
        yield x + self.down(functional.gelu(self.up(y)))


class Streaming(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InParts() for _ in range(4))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            *_, x = block(x)
        return x


class WithWeights(Plain):
    """Gives weights, and views of them, beside what it computes."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "logits": super().forward(tokens),
            "head": self.head.weight,
            "row": self.embedding.weight[3],
            "turned": self.blocks[1].up.weight.t(),
        }


def loss_of_weights(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([value.square().mean() for value in model(tokens).values()]).sum()


def loss_of_given(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    given = model.make(torch.full((*tokens.shape, 64), 0.5))  # type: ignore[operator]
    return model.read(model(tokens, given=given)).square().mean()  # type: ignore[operator]


def outputs(path: str, kind: str, stage: int, mode: str) -> None:
    build = functools.partial(Giving, kind)
    structure = Structure(build, loss_of_given)
    twins = make_twins(build, path, structure, update=mode, **changes_of(stage))
    with twins.runtime:
        twins.steps(2)
        twins.check()


def other(path: str, build: type[nn.Module], loss: Any, stage: int, mode: str = "deferred") -> None:
    # What a caller keeps of weights keeps their memory.
    options = {**changes_of(stage), "device_memory": "1MiB"}
    twins = make_twins(build, path, Structure(build, loss), update=mode, **options)
    with twins.runtime:
        twins.steps(3)
        twins.check()


CASES: Cases = {
    **{
        f"{kind}, {mode}, stage {stage}": functools.partial(outputs, kind=kind, stage=stage, mode=mode)
        for kind in KINDS
        for stage, mode in ((3, "deferred"), (3, "backward"), (2, "deferred"))
    },
    **{
        f"{name}, {mode}, stage {stage}": functools.partial(
            other, build=build, loss=loss, stage=stage, mode=mode
        )
        for name, build, loss in (
            ("nothing", Silent, loss_of),
            ("streaming", Streaming, loss_of),
            ("weights", WithWeights, loss_of_weights),
        )
        for stage, mode in ((3, "deferred"), (3, "backward"), (2, "deferred"))
    },
}
IN_SHORT = ("nested", "model output", "nothing", "streaming", "weights")


def in_short(name: str) -> bool:
    return name.startswith(IN_SHORT) and name.endswith("stage 3") and "backward" not in name


@pytest.mark.parametrize(("name", "size"), at_sizes(CASES, in_short))
def test_outputs(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)
