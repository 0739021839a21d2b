"""Small models, one per structure that a gather machinery can get wrong.

Every trainable parameter has a multiple of 64 elements, so that torch's fused AdamW takes its
vector path everywhere and results can be compared bit by bit (scalars are kept apart).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 64
VOCABULARY = 64
SMALL = 100
"""``persistence_threshold_numel`` of most tests: biases and norms of WIDTH stay, the rest goes."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """Embedding, four equal blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class UsedOutside(Plain):
    """Weights used by code that is not their module's forward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encode(tokens)
        return functional.linear(x, self.embedding.weight) + self.blocks[0].up.weight.sum() * 0.01


class Reused(Plain):
    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = self.blocks[1](self.blocks[0](x))
        return x


class RegisteredTwice(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = self.blocks[1]


class Checkpointed(Plain):
    reentrant = False

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedPairs(Plain):
    """Each checkpointed region holds two units."""

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for first in (0, 2):
            pair = self.blocks[first : first + 2]
            x = checkpoint(lambda y, pair=pair: pair[1](pair[0](y)), x, use_reentrant=False)
        return x


class CheckpointedInside(Plain):
    """The checkpointed function is a part of a unit's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InnerCheckpointBlock() for _ in range(4))


class InnerCheckpointBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._inner, self.norm(x), use_reentrant=False)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class CheckpointedPieces(Plain):
    """Checkpointed functions that call parts of units, and never a unit itself."""

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        def run(block: Block, x: torch.Tensor) -> torch.Tensor:
            return block.down(functional.gelu(block.up(x)))

        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + checkpoint(run, block, x, use_reentrant=False)
        return x


def _freeze_some(model: Plain) -> None:
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
        block.norm.requires_grad_(False)


class PartlyFrozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        _freeze_some(self)


class PartlyFrozenCheckpointed(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        _freeze_some(self)


class FrozenBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


class FrozenBlocksCheckpointed(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


class OnlyHead(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class Transposed(Plain):
    """A parameter that is not contiguous, on the root, used through views."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t() * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encode(tokens) @ self.weight[:WIDTH]
        return self.head(x @ self.weight.t()[:, :WIDTH].repeat(1, 1))


class Convolutions(nn.Module):
    memory_format: torch.memory_format = torch.contiguous_format

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.Sequential(
            nn.Conv2d(8, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, 3, padding=1, groups=8),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Linear(64, VOCABULARY)
        self.to(memory_format=self.memory_format)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        image = self.embedding(tokens).view(tokens.shape[0], 8, 8, 8)
        image = image.contiguous(memory_format=self.memory_format)
        return self.head(self.stages(image).mean((2, 3)))


class ChannelsLast(Convolutions):
    memory_format = torch.channels_last


class RandomBranch(Plain):
    """Another two of the four blocks, in another order, for every batch."""

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in random.Random(int(tokens.sum())).sample(list(self.blocks), 2):
            x = block(x)
        return x


class UnusedBlock(Plain):
    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[:2]:
            x = block(x)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.lstm(self.embedding(tokens))[0])[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(tokens))
        return self.head(x + self.attention(x, x, x)[0])


class WeightNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)


class Dropout(Plain):
    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = functional.dropout(block(x), 0.2, self.training)
        return x


class SavedOnCpuInside(Plain):
    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with torch.autograd.graph.save_on_cpu():
            for block in self.blocks:
                x = block(x)
        return x


class OnRoot(Plain):
    """Parameters directly on the root, in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2 * WIDTH))
        self.bases = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(3))
        self.named = nn.ParameterDict({"shift": torch.zeros(2 * WIDTH)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encode(tokens)
        for base in self.bases:
            x = x + x @ base
        both = torch.cat([x, x], -1) * self.scale + self.named["shift"]
        return self.head(both[..., :WIDTH] + both[..., WIDTH:])


class Degenerate(Plain):
    """A parameter without elements, and ones of fewer elements than there may be ranks, which touch
    nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.tensor([0.25]))
        self.few = nn.Parameter(torch.tensor([[0.5], [0.25], [0.75]]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.encode(tokens).flatten(0, 1), self.empty])
        logits = self.head(x)
        alone = (self.scalar * self.single * self.few.sum()).reshape(1, 1).expand(1, logits.shape[1])
        return torch.cat([logits, alone])


class _ScaledLinear(torch.autograd.Function):
    """Saves its weight as it should, twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, weight.t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, turned = ctx.saved_tensors
        assert torch.equal(weight.t(), turned)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class CustomBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _ScaledLinear.apply(_ScaledLinear.apply(x, self.up.weight), self.down.weight)


class CustomFunction(Plain):
    """A custom autograd function in the blocks' own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CustomBlock() for _ in range(4))


class CustomFunctionOutside(Plain):
    """A custom autograd function that is given parameters outside of their modules."""

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + _ScaledLinear.apply(x, block.up.weight)[..., :WIDTH]
        return x


class ModuleHooks(Plain):
    """Full backward hooks and forward hooks of the user's on sharded modules."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))
            block.register_forward_hook(lambda module, args, output: output + module.up.bias.mean())


class Nested(nn.Module):
    """Blocks within blocks, each level with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.outer = nn.ModuleList(_Outer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for outer in self.outer:
            x = outer(x)
        return self.head(x)


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.second(self.first(self.mix(x))))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


def loss_saved_on_cpu(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return loss_of(model, tokens)


def loss_through_parts(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Never calls the root."""
    return model.head(model.encode(tokens)).square().mean()


def loss_of_two_calls(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return loss_of(model, tokens) + loss_of(model, tokens.flip(0)) * 0.5


@dataclass(frozen=True)
class Structure:
    """A model to build, how its loss is made, and what its runtime needs."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of
    wrap: Callable[[nn.Module], Any] = lambda model: None
    options: dict[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ("deferred", "backward")
    also_ahead: bool = False
    inexact: tuple[str, ...] = ()  # torch takes its scalar path there


STRUCTURES: dict[str, Structure] = {
    "plain": Structure(Plain, also_ahead=True),
    "tied": Structure(Tied, also_ahead=True),
    "used outside": Structure(UsedOutside),
    "reused": Structure(Reused, also_ahead=True),
    "registered twice": Structure(RegisteredTwice),
    "checkpoint": Structure(Checkpointed, also_ahead=True),
    "checkpoint reentrant": Structure(CheckpointedReentrant, modes=("deferred",)),
    # A recompute keeps all its weights at once: two blocks have to fit.
    "checkpoint pairs": Structure(CheckpointedPairs, options={"device_memory": "192KiB"}),
    "checkpoint inside": Structure(CheckpointedInside),
    "checkpoint pieces": Structure(CheckpointedPieces),
    "partly frozen": Structure(PartlyFrozen),
    "partly frozen checkpoint": Structure(PartlyFrozenCheckpointed),
    "frozen blocks": Structure(FrozenBlocks),
    "frozen blocks checkpoint": Structure(FrozenBlocksCheckpointed),
    "only head": Structure(OnlyHead),
    "transposed": Structure(Transposed),
    "convolutions": Structure(Convolutions),
    "channels last": Structure(ChannelsLast),
    "unused block": Structure(UnusedBlock),
    "recurrent": Structure(Recurrent, also_ahead=True),
    "attention": Structure(Attention),
    "weight norm": Structure(WeightNorm),
    "dropout": Structure(Dropout),
    "save_on_cpu inside": Structure(SavedOnCpuInside),
    "save_on_cpu outside": Structure(Plain, loss_saved_on_cpu),
    "through parts": Structure(Plain, loss_through_parts),
    "two calls": Structure(Plain, loss_of_two_calls),
    "on root": Structure(OnRoot),
    "degenerate": Structure(Degenerate, inexact=("scalar", "single", "few")),
    "degenerate, all leave": Structure(
        Degenerate,
        options={"persistence_threshold_numel": 0},
        inexact=("scalar", "single", "few"),
    ),
    "custom function": Structure(CustomFunction),
    "custom function outside": Structure(CustomFunctionOutside, options={"device_memory": "1MiB"}),
    "module hooks": Structure(ModuleHooks),
    "nested by class": Structure(Nested, wrap=lambda model: [Block, _Outer]),
    "nested by name": Structure(Nested, wrap=lambda model: ["outer.0", "outer.0.first", "outer.1"]),
    "nested by module": Structure(Nested, wrap=lambda model: [model.outer[1], model.outer[1].second]),
    "nothing wrapped": Structure(Nested, wrap=lambda model: []),
    "all in one": Structure(Plain, wrap=lambda model: [model]),
}
