"""zero.Init: what is constructed inside is the same to the bit, and does not take ordinary memory."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.errors import ConfigError, TierIOError
from tiermem.zero.construction import Init
from tiermem.zero.parameter_files import SMALLEST_BYTES, ParameterFiles

WIDTH = 160  # a square of it is above the smallest size


class Tied(nn.Module):
    """Parameters of its own, tied ones, a transposed one, and an initialiser at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.converted = nn.Linear(WIDTH, WIDTH).double().float()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) @ self.scale
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.converted(x))


def copied_layers() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4), 3, enable_nested_tensor=False)


def normalised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


BUILDERS = [Tied, copied_layers, normalised, lambda: nn.LSTM(WIDTH, WIDTH)]


def construct(build: Callable[[], nn.Module], **init: Any) -> nn.Module:
    torch.manual_seed(5)
    with Init(**init):
        return build()


def plain(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


def mapped_files() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("(deleted)" in line and "rw-s" in line for line in lines)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Whatever happens, nothing is to be seen in its directory."""
    yield {"device": "cpu", "host_memory": "32MiB", "paths": [tmp_path]}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("build", BUILDERS)
def test_values_and_random_state_are_the_same(build: Any, config: dict[str, Any]) -> None:
    expected, expected_state = plain(build), torch.get_rng_state()
    model = construct(build, config=config)
    assert torch.equal(torch.get_rng_state(), expected_state)
    assert list(dict(model.named_parameters())) == list(dict(expected.named_parameters()))
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.stride() == b.stride(), name
        assert a.is_leaf
        assert a.requires_grad
        assert ParameterFiles.holds(a) == (a.nbytes >= SMALLEST_BYTES), name


def test_it_trains_as_if_it_had_been_constructed_without(config: dict[str, Any]) -> None:
    gc.collect()
    before, descriptors = mapped_files(), len(os.listdir("/proc/self/fd"))
    results = []
    for make in (plain, lambda build: construct(build, config=config)):
        model = make(Tied)
        with tiermem.Runtime({**config, "compute_dtype": "bf16"}) as runtime:
            tiermem.shard(model, runtime)
            assert mapped_files() == before  # they went as the units were moved
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                model(torch.arange(8)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([tiermem.full_master(p) for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_files_go_with_the_model_and_never_have_descriptors(config: dict[str, Any]) -> None:
    gc.collect()
    before, descriptors = mapped_files(), len(os.listdir("/proc/self/fd"))
    model = construct(Tied, config=config)
    assert mapped_files() - before == 6
    assert len(os.listdir("/proc/self/fd")) == descriptors
    del model
    gc.collect()
    assert mapped_files() == before


def test_a_filesystem_without_unnamed_files(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # EISDIR, as old overlays say
    model = construct(Tied, config=config)
    assert ParameterFiles.holds(model.scale)
    assert torch.equal(model.scale, plain(Tied).scale)


def test_an_existing_module_is_moved(config: dict[str, Any]) -> None:
    model = plain(Tied)
    Init(model, config_dict_or_path=config)
    assert ParameterFiles.holds(model.head.weight)
    assert model.head.weight is model.embedding.weight
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain(Tied).parameters(), strict=True)
    )


def test_outside_nothing_is_moved(config: dict[str, Any]) -> None:
    with Init(config=config), Init(config=config):
        pass
    with pytest.raises(ValueError, match="inside"), Init(config=config, dtype=torch.float64):
        raise ValueError("inside")
    with Init(enabled=False, config={"no such key": 1}, mpu=object()):
        inside = Tied()
    assert torch.get_default_dtype() is torch.float32
    assert not any(ParameterFiles.holds(p) for model in (inside, Tied()) for p in model.parameters())


def test_dtype_is_the_default_inside(config: dict[str, Any]) -> None:
    model = construct(Tied, config=config, dtype=torch.bfloat16)
    assert model.scale.dtype == model.blocks[0].bias.dtype == torch.bfloat16


def test_meta_and_lazy_parameters_are_left_alone(config: dict[str, Any]) -> None:
    with Init(config=config):
        lazy = nn.LazyLinear(WIDTH)
        with torch.device("meta"):
            meta = nn.Linear(WIDTH, WIDTH)
    assert meta.weight.is_meta
    assert isinstance(lazy.weight, nn.UninitializedParameter)


def test_what_has_no_meaning_is_said_once(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Init(config=config, remote_device="cpu", mem_efficient_linear=False, mpu=object())
    (record,) = caplog.records
    assert "mem_efficient_linear, remote_device, mpu" in record.getMessage()


def test_mistakes_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        Init(config={"pathz": []})
    with pytest.raises(ConfigError, match="give one of them"):
        Init(config=config, config_dict_or_path=config)
    with pytest.raises(ConfigError, match="floating-point"):
        Init(config=config, dtype=torch.int8)
    with pytest.raises(TierIOError, match="nowhere"):
        Init(config={**config, "paths": [tmp_path / "nowhere"]})


def test_a_full_disk_says_where_and_how_much(mount: Callable[..., Path]) -> None:
    directory = mount(2 * WIDTH * WIDTH * 4)
    config = {"device": "cpu", "host_memory": "32MiB", "paths": [directory]}
    with pytest.raises(TierIOError, match=r"102400 bytes.*are free. Remedy") as caught:
        construct(Tied, config=config)
    assert str(directory) in str(caught.value)
    del caught
    gc.collect()
    model = construct(lambda: nn.Linear(WIDTH, WIDTH), config=config)
    assert ParameterFiles.holds(model.weight)


LIMITED = """
import resource, sys
import torch
from torch import nn
from tiermem.zero.construction import Init

WIDTH, LAYERS = 1024, 32
torch.set_num_threads(1)
layer_bytes = 2 * WIDTH * WIDTH * 4

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        first = Layer()
        import copy
        self.copies = nn.ModuleList([copy.deepcopy(first) for _ in range(LAYERS // 2)])
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS // 2))
        self.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)

def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024

files = Init(config={"paths": [sys.argv[1]], "device": "cpu"}, enabled=sys.argv[2] == "1")
with files:
    Layer()  # what torch allocates once
limit = data_bytes() + 2 * layer_bytes
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # of ordinary memory
with files:
    model = Model()
print(sum(p.nbytes for p in model.parameters()) // layer_bytes)
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_ordinary_memory_is_that_of_a_layer(
    enabled: bool, tmp_path: Path, plain_environment: dict[str, str]
) -> None:
    """The model has 32 layers; the process may have two in ordinary memory."""
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(int(enabled))],
        capture_output=True,
        text=True,
        # Freed blocks go back to the system, so that the limit counts what is in use.
        env={**plain_environment, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        check=False,
    )
    if enabled:
        assert result.stdout == "32\n", result.stderr
    else:
        assert "allocate memory" in result.stderr
