"""What a placeholder is asked about its shape, dtype and identity needs no data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiermem
from tiermem.zero import placeholder

QUESTIONS = {
    "shape": lambda p: tuple(p.shape),
    "size": lambda p: tuple(p.size()),
    "size of": lambda p: p.size(0),
    "dim": lambda p: (p.dim(), p.ndim, p.ndimension()),
    "numel": lambda p: (p.numel(), p.nelement(), torch.numel(p)),
    "len": len,
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "stride": lambda p: p.stride(),
    "storage offset": lambda p: p.storage_offset(),
    "contiguous": lambda p: p.is_contiguous(),
    "bytes": lambda p: (p.element_size(), p.itemsize, p.nbytes),
    "kinds": lambda p: (p.is_floating_point(), p.is_complex(), p.is_cuda, p.is_meta, p.is_sparse),
    "torch kinds": lambda p: (torch.is_floating_point(p), torch.is_complex(p), torch.is_tensor(p)),
    "type": lambda p: (p.type(), torch.typename(p)),
    "same size": lambda p: (p.is_same_size(p), p.is_same_size(torch.ones(1)), p.is_same_size(other=p)),
    "same memory": lambda p: (p.is_set_to(p), p.is_set_to(tensor=p)),
    "where": lambda p: (p.get_device(), p.is_pinned(), p.is_shared(), p.is_inference(), p.is_signed()),
    "leaf": lambda p: (p.is_leaf, p.grad_fn, p.requires_grad, p.grad),
    "class": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor)),
    "new device": lambda p: torch.empty(2, device=p.device, dtype=p.dtype).shape,
}


def test_metadata_is_that_of_the_parameter_and_reads_nothing(twins) -> None:
    before = _state(twins)
    for question, ask in QUESTIONS.items():
        for plain, sharded in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
            assert ask(sharded) == ask(plain), question
        assert _state(twins) == before, question


def test_every_name_listed_as_metadata_is_answered_without_data(twins) -> None:
    param, plain = twins.model.head.weight, twins.plain.head.weight
    before = _state(twins)
    for name in sorted(placeholder._METADATA - {"__hash__"}):
        if not hasattr(torch.Tensor, name):  # has_names is gone since torch 2.13
            continue
        assert getattr(param, name)() == getattr(plain, name)(), name
    for name in sorted(placeholder._METADATA_PROPERTIES):
        getattr(param, name, None)
    assert _state(twins) == before


def test_two_parameters_are_not_the_same_memory(twins) -> None:
    first, second = twins.model.blocks[0].up.weight, twins.model.blocks[1].up.weight
    assert first.is_same_size(second)
    assert not first.is_set_to(second)
    assert not first.is_set_to(tensor=second)
    assert not first.is_set_to(torch.ones(2))
    with tiermem.gathered(first):
        assert first.is_set_to(twins.model.blocks[0].up.weight)


def test_casts_by_name(twins) -> None:
    param = twins.model.head.weight
    assert param.type(torch.float32) is param
    assert param.type("torch.FloatTensor") is param
    assert param.type(torch.float64).dtype == torch.float64


def test_a_parameter_in_place_of_a_list_gets_torchs_own_message(twins) -> None:
    with pytest.raises(TypeError, match="iterable of Tensors"):
        tiermem.optim.AdamW(twins.model.head.weight)


def _state(twins):
    return twins.runtime.stats().read_bytes, [group.state for group in twins.runtime.groups]


def test_repr_names_the_parameter_and_reads_nothing(twins) -> None:
    before = _state(twins)
    text = repr(twins.model.blocks[0].up.weight)
    assert "blocks.0.up.weight" in text
    assert "(128, 64)" in text
    assert repr(twins.model)
    assert _state(twins) == before


def test_hash_and_identity(twins) -> None:
    first, again = list(twins.model.parameters()), list(twins.model.parameters())
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert len({*first, *again}) == len(first)
    assert {p: n for n, p in twins.model.named_parameters()}[first[0]] == "embedding.weight"
    twins.step()
    assert all(a is b for a, b in zip(first, twins.model.parameters(), strict=True))


def test_values_are_those_of_the_parameter(twins) -> None:
    for plain, sharded in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
        assert torch.equal(plain, sharded.detach().clone())
        assert plain.sum().item() == sharded.sum().item()
        assert torch.equal(plain[:3], sharded[:3])
        assert (plain.detach().numpy() == sharded.detach().numpy()).all()
        assert plain.tolist() == sharded.tolist()
        assert torch.equal(torch.stack([plain, plain]), torch.stack([sharded, sharded]))
        assert plain.norm().item() == sharded.norm().item()
    assert repr(float(twins.plain.head.weight[0, 0])) == repr(float(twins.model.head.weight[0, 0]))
