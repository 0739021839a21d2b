"""A byte-level GPT in plain PyTorch: the model that `tiermem train` trains.

Every module that owns parameters has ``reset_parameters()``, so a model built on the meta device
can be initialised one module at a time and never has to exist whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own custom)

INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The sizes of a `GPT`. The vocabulary is the 256 byte values."""

    num_layers: int
    hidden_size: int
    num_heads: int
    context: int = 1024
    vocab_size: int = 256
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.hidden_size, self.num_heads, self.context, self.vocab_size)
        if min(sizes) < 1:
            raise ValueError(f"all sizes of a GPT must be at least 1: {self}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )

    @property
    def num_parameters(self) -> int:
        """The number of elements in all parameters of the built model."""
        hidden = self.hidden_size
        block = 12 * hidden * hidden + 13 * hidden
        embeddings = (self.vocab_size + self.context) * hidden
        head = 0 if self.tie_embeddings else self.vocab_size * hidden
        return self.num_layers * block + embeddings + 2 * hidden + head

    @classmethod
    def for_parameters(cls, num_parameters: int, *, context: int = 1024) -> GPTConfig:
        """The configuration of familiar proportions whose size is closest to ``num_parameters``.

        Widths are multiples of 64; the depth is the one whose total comes nearest. Among the
        widths that come within 2%, the one whose depth is closest to the GPT family's wins
        (12 x 768, 24 x 1024, 48 x 1600, 96 x 12288).
        """
        if num_parameters < 100_000:
            raise ValueError(f"a GPT needs at least 100000 parameters, not {num_parameters}")
        best: tuple[tuple[float, float], GPTConfig] | None = None
        for hidden in range(64, 20480 + 64, 64):
            fixed = cls(1, hidden, hidden // 64, context)
            per_layer = 12 * hidden * hidden + 13 * hidden
            layers = max(1, round((num_parameters - fixed.num_parameters) / per_layer) + 1)
            config = cls(layers, hidden, _num_heads(hidden), context)
            error = abs(config.num_parameters / num_parameters - 1)
            shape = abs(math.log(layers / _usual_depth(hidden)))
            rank = (max(0.0, error - 0.02), shape)
            if best is None or rank < best[0]:
                best = (rank, config)
        assert best is not None
        return best[1]


def _usual_depth(hidden: int) -> float:
    """Layers that go with a width: interpolated through the sizes of the GPT-2 and GPT-3 papers."""
    known = ((256, 6), (512, 8), (768, 12), (1024, 24), (1600, 48), (4096, 56), (12288, 96))
    if hidden <= known[0][0]:
        return max(1.0, known[0][1] * hidden / known[0][0])
    for (low, low_depth), (high, high_depth) in pairwise(known):
        if hidden <= high:
            share = math.log(hidden / low) / math.log(high / low)
            return float(low_depth * (high_depth / low_depth) ** share)
    return float(known[-1][1])


def _num_heads(hidden: int) -> int:
    """Heads of 64 elements, or of 128 where the model is wide."""
    return hidden // 128 if hidden >= 2560 and hidden % 128 == 0 else hidden // 64


class Embedding(nn.Embedding):
    """An embedding initialised as GPT-2's."""

    def reset_parameters(self) -> None:
        _normal(self.weight, INIT_STD)


class Linear(nn.Linear):
    """A linear layer initialised as GPT-2's; ``std`` is smaller where it feeds the residual stream."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, std: float = INIT_STD
    ) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        _normal(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size, std=_residual_std(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, hidden))
        return out


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = Linear(4 * config.hidden_size, config.hidden_size, std=_residual_std(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """tokens (batch, sequence) int64 -> logits (batch, sequence, vocab), or the mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.context, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.ln_f = nn.LayerNorm(config.hidden_size)
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, or with ``targets`` (batch, sequence) the mean cross entropy in fp32."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit the context of {self.config.context}")
        positions = torch.arange(length, device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def _normal(weight: torch.Tensor, std: float) -> None:
    """Fill with values drawn on the CPU in fp32: the same for every device and, rounded, dtype."""
    if weight.device.type != "meta":
        weight.copy_(torch.empty(weight.shape, dtype=torch.float32, device="cpu").normal_(std=std))


def _residual_std(config: GPTConfig) -> float:
    return INIT_STD / math.sqrt(2 * config.num_layers)


def make_initializer(seed: int) -> Callable[[nn.Module, str], None]:
    """``init(module, qualified_name)`` that resets the module's own parameters.

    The random stream depends on ``seed`` and the name alone, so the values do not depend on the
    order in which modules are initialised, nor on where the rest of the model lives. The global
    CPU generator is left as it was found.
    """

    def initialize(module: nn.Module, name: str) -> None:
        reset = getattr(module, "reset_parameters", None)
        if reset is None or next(module.parameters(recurse=False), None) is None:
            return
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            reset()

    return initialize


def init_model(model: nn.Module, seed: int) -> None:
    """Initialise every module of ``model`` in place; see `make_initializer`."""
    initialize = make_initializer(seed)
    for name, module in model.named_modules():
        initialize(module, name)
