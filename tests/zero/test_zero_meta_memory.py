"""A model from the meta device never exists whole in ordinary memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_models import Plain, Recurrent, Tied

import tiermem


class LiveBytes(TorchDispatchMode):
    """Bytes of CPU storages that torch functions have made and that are alive, with their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            storage = result.untyped_storage()
            key = storage._cdata
            if func.overloadpacket in _MAKERS and key not in self._alive:
                self._alive[key] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, key, None)
                self.peak = max(self.peak, sum(self._alive.values()))
        return result


_MAKERS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten.clone,
    torch.ops.aten.full,
    torch.ops.aten.zeros,
}


def largest_module_bytes(model: nn.Module) -> int:
    return max(
        sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        for module in model.modules()
    )


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("build", [Plain, Tied, Recurrent])
def test_peak_of_ordinary_memory(make_runtime, build, dtype) -> None:
    with torch.device("meta"):
        model = build()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    bound = 2 * largest_module_bytes(model) + 64 * 1024  # one module, and one copy on its way
    runtime = make_runtime(compute_dtype=dtype)
    with LiveBytes() as live:
        tiermem.shard(model, runtime)
    assert live.peak > 0
    assert live.peak <= bound
    if build is not Recurrent:
        assert live.peak < total


def test_device_memory_during_sharding_is_that_of_training(make_runtime) -> None:
    with torch.device("meta"):
        model = Plain()
    runtime = make_runtime()
    tiermem.shard(model, runtime)
    stats = runtime.stats()
    assert stats.device.peak <= stats.device.budget
    assert stats.host.peak <= stats.host.budget
