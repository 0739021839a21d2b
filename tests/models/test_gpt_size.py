"""A configuration knows the size of its model exactly."""

from __future__ import annotations

import pytest
import torch

from tiermem.models.gpt import GPT, GPTConfig


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 1, 8), (3, 96, 4, 17), (2, 768, 12, 1024)])
def test_num_parameters_is_exact(shape: tuple[int, int, int, int], tied: bool) -> None:
    config = GPTConfig(*shape, tie_embeddings=tied)
    with torch.device("meta"):
        model = GPT(config)
    assert config.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "count",
    [1e6, 1e7, 3e7, 6e7, 125e6, 350e6, 1.3e9, 1.5e9, 2.7e9, 6.7e9, 13e9, 30e9, 70e9, 175e9, 1e12],
)
def test_for_parameters_comes_close(count: float) -> None:
    config = GPTConfig.for_parameters(int(count))
    assert abs(config.num_parameters / count - 1) < 0.05
    assert config.hidden_size % config.num_heads == 0


def test_known_shapes() -> None:
    assert abs(GPTConfig.for_parameters(1_500_000_000).num_layers - 48) <= 2
    assert abs(GPTConfig.for_parameters(350_000_000).hidden_size - 1024) <= 128
    assert abs(GPTConfig.for_parameters(125_000_000).hidden_size - 768) <= 128


@pytest.mark.parametrize("bad", [(0, 64, 1, 8), (1, 65, 2, 8), (1, 64, 1, 0)])
def test_bad_sizes_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|multiple"):
        GPTConfig(*bad)
