"""The model's two ways of being called agree."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tiermem.models.gpt import GPT, GPTConfig, init_model

CONFIG = GPTConfig(num_layers=2, hidden_size=64, num_heads=2, context=16)


@pytest.fixture
def model() -> GPT:
    built = GPT(CONFIG)
    init_model(built, seed=0)
    return built


def test_loss_is_the_cross_entropy_of_the_logits(model: GPT) -> None:
    tokens = torch.randint(256, (3, 16))
    targets = torch.randint(256, (3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 256)
    expected = F.cross_entropy(logits.reshape(-1, 256), targets.reshape(-1))
    assert torch.equal(model(tokens, targets), expected)


def test_attention_is_causal(model: GPT) -> None:
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 0
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])


def test_too_long_a_sequence_is_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit the context of 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_tied_head_shares_the_embedding() -> None:
    tied = GPT(GPTConfig(1, 64, 1, 8, tie_embeddings=True))
    assert tied.head.weight is tied.wte.weight
