"""Configurations that people train with: what acts of each, to the value, or why it is refused.

The files lie beside the repository (``shared/configs``), and nine blocks in a text there; this skips
where they are absent. ``deepspeed_expected.json`` has a row for every file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed_rig import effective

from tiermem.config import DeepSpeedConfig, parse_lenient, read_deepspeed, read_json
from tiermem.config.deepspeed_keys import TABLE
from tiermem.errors import ConfigError

SHARED = Path(__file__).resolve().parents[3] / "shared"
EXPECTED: dict[str, Any] = json.loads(
    Path(__file__).with_name("deepspeed_expected.json").read_text(encoding="utf-8")
)
ZERO = "zero_optimization"

# The nine blocks of the text, in its order: what acts, or the one mistake.
BLOCKS: list[dict[str, Any] | str] = [
    {f"{ZERO}.stage": 1},
    {
        f"{ZERO}.stage": 2,
        f"{ZERO}.contiguous_gradients": True,
        f"{ZERO}.overlap_comm": True,
        f"{ZERO}.reduce_bucket_size": 500_000_000,
        f"{ZERO}.allgather_bucket_size": 500_000_000,
    },
    {
        f"{ZERO}.stage": 3,
        f"{ZERO}.overlap_comm": True,
        f"{ZERO}.contiguous_gradients": True,
        f"{ZERO}.stage3_prefetch_bucket_size": 200_000_000,
        f"{ZERO}.stage3_param_persistence_threshold": 100_000,
        f"{ZERO}.stage3_max_live_parameters": 1_000_000_000,
    },
    {
        f"{ZERO}.stage": 2,
        f"{ZERO}.offload_optimizer.device": "host",
        f"{ZERO}.offload_optimizer.pin_memory": True,
    },
    {
        f"{ZERO}.stage": 3,
        f"{ZERO}.offload_param.device": "nvme",
        f"{ZERO}.offload_param.nvme_path": ("/local_nvme",),
        f"{ZERO}.offload_param.pin_memory": True,
        f"{ZERO}.offload_optimizer.device": "nvme",
        f"{ZERO}.offload_optimizer.nvme_path": ("/local_nvme",),
        f"{ZERO}.offload_optimizer.pin_memory": True,
        "aio.block_size": 1_048_576,
        "aio.queue_depth": 8,
    },
    "activation_checkpointing: refused: not built yet",
    {f"{ZERO}.stage": 2, "fp16.enabled": True},
    {f"{ZERO}.stage": 2, f"{ZERO}.offload_optimizer.device": "host"},
    {
        f"{ZERO}.stage": 3,
        f"{ZERO}.offload_optimizer.device": "host",
        f"{ZERO}.offload_optimizer.pin_memory": True,
        f"{ZERO}.offload_param.device": "host",
        f"{ZERO}.offload_param.pin_memory": True,
    },
]


def configurations() -> Path:
    if not (SHARED / "configs").is_dir():
        pytest.skip("no shared/configs beside the repository")
    return SHARED / "configs"


def about_auto(config: DeepSpeedConfig) -> set[str]:
    prefix = '"auto" stands for: '
    notes = [note.removeprefix(prefix) for note in config.notes if note.startswith(prefix)]
    return {each.partition(": ")[0] for note in notes for each in note.split("; ")}


def leaves(given: Any, block: str = "") -> list[tuple[str, Any]]:
    """Every key that holds a value, dotted, but for comments and nulls."""
    found = []
    for key, value in given.items():
        name = f"{block}.{key}" if block else key
        today = TABLE.today(name)
        if key.startswith("_") or value is None:
            continue
        inside = isinstance(value, dict) and (TABLE.children(today) or today.endswith(".params"))
        found += leaves(value, name) if inside else [(name, value)]
    return found


def test_every_file_has_a_row() -> None:
    names = {path.name for path in configurations().iterdir() if path.name[0].isdigit()}
    assert names == set(EXPECTED)


@pytest.mark.parametrize("name", [name for name in EXPECTED if "refused" in EXPECTED[name]])
def test_what_cannot_be_done_is_refused_with_every_reason(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(configurations() / name)
    assert str(caught.value).split("\n  ")[1:] == EXPECTED[name]["refused"]


@pytest.mark.parametrize("name", [name for name in EXPECTED if "refused" not in EXPECTED[name]])
def test_what_acts_acts_as_expected(name: str) -> None:
    config, expected = read_deepspeed(configurations() / name), EXPECTED[name]
    assert json.loads(json.dumps(effective(config))) == expected["effective"]
    tier = config.tier.model_dump(exclude_unset=True, mode="json")
    assert tier == expected["tier"]
    assert about_auto(config) == set(expected["auto"])
    said = [re.match(r"[\w.]+", note) for note in config.notes if not note.startswith('"auto"')]
    assert sorted(match[0] for match in said if match) == expected["notes"]


@pytest.mark.parametrize("name", [name for name in EXPECTED if "refused" not in EXPECTED[name]])
def test_no_key_of_a_file_is_dropped_silently(name: str) -> None:
    """Each acts, is said to do nothing, or asks for what happens anyway."""
    path = configurations() / name
    config, notes = read_deepspeed(path), "\n".join(read_deepspeed(path).notes)
    for spelling, value in leaves(read_json(path)):
        today = TABLE.today(spelling)
        if today in config.effective or today in about_auto(config) or spelling in notes:
            continue
        key = TABLE.keys.get(today)
        if today.startswith("fp16."):
            assert config.tier.fp16 is None or config.tier.fp16.loss_scale > 0 or config.loss_scale
        else:
            assert key is not None, spelling
            asks = key.is_on(value) if key.is_on else value not in key.fine
            assert not asks, spelling


def blocks_of_the_text() -> list[str]:
    text = SHARED / "reference" / "zero-stages.txt"
    if not text.is_file():
        pytest.skip("no shared/reference beside the repository")
    pattern = re.compile(r"^(?://[^\n]*\n)*\{\n.*?^\}$", re.MULTILINE | re.DOTALL)
    return pattern.findall(text.read_text(encoding="utf-8"))


def test_the_text_has_nine_blocks() -> None:
    assert len(blocks_of_the_text()) == len(BLOCKS) == 9


@pytest.mark.parametrize("at", range(len(BLOCKS)))
def test_each_block_of_the_text_acts_or_says_why_not(at: int) -> None:
    config, expected = parse_lenient(blocks_of_the_text()[at]), BLOCKS[at]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            read_deepspeed(config)
    else:
        assert effective(read_deepspeed(config)) == expected
