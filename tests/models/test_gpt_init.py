"""Initial values depend on the seed and the module's name alone."""

from __future__ import annotations

import pytest
import torch

from tiermem.models.gpt import GPT, GPTConfig, init_model, make_initializer

CONFIG = GPTConfig(num_layers=2, hidden_size=64, num_heads=2, context=16)


def _direct() -> GPT:
    model = GPT(CONFIG)
    init_model(model, seed=3)
    return model


def test_meta_model_initialised_module_by_module_is_the_same() -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    initialize = make_initializer(3)
    for name, module in reversed(list(model.named_modules())):
        if next(module.parameters(recurse=False), None) is not None:
            module.to_empty(device="cpu", recurse=False)
            initialize(module, name)
    expected = _direct().state_dict()
    assert model.state_dict().keys() == expected.keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_global_generator_is_left_alone() -> None:
    model = GPT(CONFIG)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    init_model(model, seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_seeds_and_names_differ() -> None:
    one, two = _direct(), GPT(CONFIG)
    init_model(two, seed=4)
    assert not torch.equal(one.wte.weight, two.wte.weight)
    first, second = one.blocks[0].state_dict(), one.blocks[1].state_dict()
    assert not torch.equal(first["mlp.up.weight"], second["mlp.up.weight"])


def test_every_owner_of_parameters_can_reset() -> None:
    for name, module in GPT(CONFIG).named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            assert hasattr(module, "reset_parameters"), name


def test_residual_projections_are_scaled() -> None:
    model = GPT(GPTConfig(num_layers=8, hidden_size=256, num_heads=4, context=16))
    init_model(model, seed=0)
    block = model.blocks[0]
    assert float(block.mlp.down.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.02)
    assert float(block.mlp.up.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert not block.attn.qkv.bias.any()
