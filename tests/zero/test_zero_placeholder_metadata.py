"""What a placeholder is asked about its shape, dtype and identity needs no data."""

from __future__ import annotations

import torch
from torch import nn

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
