"""Wrong keys and values: all of them in one message, with the nearest valid key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tiermem.config import IOConfig, TierConfig, load_config
from tiermem.errors import ConfigError
from tiermem.io import BACKENDS

MISSPELT = {
    "param": "params",
    "parms": "params",
    "optimiser": "optimizer",
    "path": "paths",
    "nvme_paths": "paths",
    "host_mem": "host_memory",
    "host-memory": "host_memory",
    "hostmemory": "host_memory",
    "device_mem": "device_memory",
    "update_mode": "update",
    "gradient_acumulation_steps": "gradient_accumulation_steps",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clip": "gradient_clipping",
    "prefetch_byte": "prefetch_bytes",
    "subgroup_numel": "sub_group_numel",
    "stripe_byte": "stripe_bytes",
    "pinned_memory": "pin_memory",
    "compute_type": "compute_dtype",
    "persistence_threshold": "persistence_threshold_numel",
    "IO": "io",
}

MISSPELT_IO = {
    "backends": "backend",
    "chunk_byte": "chunk_bytes",
    "chunksize_bytes": "chunk_bytes",
    "read_deep": "read_depth",
    "write_dept": "write_depth",
    "dirct": "direct",
}

NUMBERS = (
    "host_memory",
    "device_memory",
    "resident_memory",
    "prefetch_bytes",
    "stripe_bytes",
    "sub_group_numel",
    "persistence_threshold_numel",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

WRONG: list[tuple[str, Any]] = [
    ("params", "disk"),
    ("params", 3),
    ("params", None),
    ("optimizer", "NVMe drive"),
    ("host_memory", "lots"),
    ("host_memory", -1),
    ("host_memory", 0),
    ("host_memory", "12 parsecs"),
    ("host_memory", [1]),
    ("device_memory", 0),
    ("resident_memory", -4096),
    ("update", "later"),
    ("gradient_accumulation_steps", 0),
    ("gradient_accumulation_steps", 1.5),
    ("gradient_accumulation_steps", "two"),
    ("gradient_clipping", -0.1),
    ("gradient_clipping", "tight"),
    ("prefetch_bytes", -1),
    ("sub_group_numel", 0),
    ("sub_group_numel", 100),
    ("persistence_threshold_numel", -1),
    ("stripe_bytes", 1000),
    ("stripe_bytes", 5000),
    ("stripe_bytes", 0),
    ("pin_memory", "perhaps"),
    ("compute_dtype", "fp8"),
    ("compute_dtype", "float8"),
    ("path_weights", "heavy"),
    ("paths", 3),
    ("io", "libaio"),
    ("params", True),
    ("compute_dtype", False),
    ("path_weights", [True, True]),
    ("paths", True),
    *((key, value) for key in NUMBERS for value in (True, False)),
]

WRONG_IO: list[tuple[str, Any]] = [
    ("backend", "io-uring"),
    ("backend", 1),
    ("chunk_bytes", 1000),
    ("chunk_bytes", 0),
    ("chunk_bytes", 5000),
    ("chunk_bytes", "2GiB"),
    ("read_depth", 0),
    ("read_depth", 1 << 20),
    ("write_depth", -1),
    ("write_depth", "deep"),
    ("direct", "sometimes"),
    *((key, value) for key in ("chunk_bytes", "read_depth", "write_depth") for value in (True, False)),
]


@pytest.mark.parametrize(("wrong", "right"), MISSPELT.items())
def test_a_misspelt_key_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(wrong)}.*unknown key.*'{right}'"):
        load_config({wrong: 1})


@pytest.mark.parametrize(("wrong", "right"), MISSPELT_IO.items())
def test_a_misspelt_key_below_io_names_the_nearest_there(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=rf"io\.{wrong}.*unknown key.*'{right}'"):
        load_config({"io": {wrong: 1}})


def test_a_key_like_no_other_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config({"xyzzy": 1})
    for key in ("params", "optimizer", "paths", "host_memory", "update"):
        assert key in str(caught.value)


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda v: str(v))
def test_a_wrong_value_names_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({key: value})
    assert key in str(caught.value)
    shown = value if isinstance(value, str) else repr(value)
    assert shown in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("key", "value"), WRONG_IO, ids=lambda v: str(v))
def test_a_wrong_value_below_io_names_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"io": {key: value}})
    assert f"io.{key}" in str(caught.value)
    assert (value if isinstance(value, str) else repr(value)) in str(caught.value)


def test_all_problems_are_in_one_message() -> None:
    with pytest.raises(ConfigError, match="5 problems") as caught:
        load_config(
            {
                "parms": "nvme",
                "optimizer": "disk",
                "host_memory": "lots",
                "stripe_bytes": 5,
                "io": {"read_depth": 0},
            }
        )
    for part in (
        "parms",
        "params",
        "optimizer",
        "disk",
        "host_memory",
        "stripe_bytes",
        "io.read_depth",
    ):
        assert part in str(caught.value)


def test_problems_of_several_keys_together_are_named_too() -> None:
    for wrong, parts in (
        ({"params": "nvme"}, ("params", "paths")),
        ({"optimizer": "nvme", "paths": []}, ("optimizer", "paths")),
        ({"paths": ["/a", "/b"], "path_weights": [1.0]}, ("path_weights", "1", "2")),
        ({"paths": ["/a"], "path_weights": [0.0]}, ("path_weights", "0")),
        ({"paths": ["/a"], "path_weights": [-1.0]}, ("path_weights", "-1")),
        ({"paths": ["/a"], "path_weights": [float("nan")]}, ("path_weights", "nan")),
        ({"paths": ["/a"], "path_weights": [float("inf")]}, ("path_weights", "inf")),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(wrong)
        for part in parts:
            assert part in str(caught.value)


def test_the_message_has_no_trace_of_the_library_below() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"params": "disk", "paths": 7})
    assert "pydantic" not in str(caught.value).lower()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1MiB", 1 << 20), ("1 GiB", 1 << 30), ("2MB", 2_000_000), ("4096", 4096), (12_345, 12_345)],
)
def test_sizes_take_numbers_and_strings(text: str | int, nbytes: int) -> None:
    config = load_config({"host_memory": text, "device_memory": text, "prefetch_bytes": text})
    assert config.host_memory == config.device_memory == config.prefetch_bytes == nbytes


def test_sources_are_a_config_a_mapping_and_a_json_file(tmp_path: Path) -> None:
    wanted = {"params": "host", "host_memory": "64MiB", "io": {"read_depth": 4}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(wanted))
    given = load_config(wanted)
    assert load_config(given) is given
    assert load_config(file) == given
    assert load_config(str(file)) == given
    assert given.io.read_depth == 4
    assert given.host_memory == 64 << 20
    with tiermem.Runtime(file) as runtime:
        assert runtime.config == given


def test_a_file_that_cannot_be_read_or_is_not_json_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    with pytest.raises(ConfigError, match=r"missing\.json.*No such file"):
        load_config(missing)
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text('{"params" "host"}')
    with pytest.raises(ConfigError, match=r"broken\.json.*JSON"):
        load_config(broken)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError, match=r"binary\.json"):
        load_config(binary)
    listed = tmp_path / "list.json"
    listed.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(listed)


@pytest.mark.parametrize("source", [None, 3, ["params"], object()])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="mapping"):
        load_config(source)


def test_problems_in_a_file_are_reported_like_those_of_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"parms": "nvme", "host_memory": -3}))
    with pytest.raises(ConfigError, match="2 problems") as caught:
        tiermem.Runtime(file)
    assert "params" in str(caught.value)


def test_a_checked_configuration_cannot_be_changed() -> None:
    config = load_config({})
    with pytest.raises(Exception, match="frozen"):
        config.params = "nvme"  # type: ignore[misc]


def test_every_key_is_documented_where_its_name_does_not_say_it() -> None:
    for model in (TierConfig, IOConfig):
        for name, field in model.model_fields.items():
            short = {"io", "backend", "chunk_bytes", "read_depth", "write_depth", "stripe_bytes"}
            undocumented = short | {"gradient_accumulation_steps"}
            assert field.description or name in undocumented, name


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "warp-drive", "meta", "xpu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match=f"device.*{device}"):
        tiermem.Runtime({"device": device, "host_memory": "16MiB"})


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_every_backend_can_be_asked_for(backend: str) -> None:
    assert load_config({"io": {"backend": backend}}).io.backend == backend


@pytest.mark.parametrize("value", ["banana", -5, 1.5, "-1MiB"])
def test_what_is_no_size_is_told_how_sizes_look(value: object) -> None:
    with pytest.raises(ConfigError, match=r"host_memory: must be .*256MiB.*; got"):
        load_config({"host_memory": value})


def test_one_path_that_is_no_list_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"paths: must be a list, for example \['drive'\]"):
        load_config({"paths": "drive"})


def test_torch_dtypes_are_understood() -> None:
    assert load_config({"compute_dtype": torch.bfloat16}).compute_dtype == "bf16"
    assert load_config({"compute_dtype": torch.float32}).compute_dtype == "fp32"
