"""A runtime takes a DeepSpeed configuration, and says what it leaves to the engine."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.config import is_deepspeed, load_config, read_deepspeed
from tiermem.errors import ConfigError

ZERO = "zero_optimization"


def lines_of(caplog: pytest.LogCaptureFixture, config: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tiermem.config"):
        load_config(config)
    prefix = "DeepSpeed configuration: "
    return [r.getMessage().removeprefix(prefix) for r in caplog.records]


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        ({ZERO: {"stage": 3}}, True),
        ({"train_batch_size": 8}, True),
        ({"aio": {"queue_depth": 8}}, True),
        ({"bf16": {"enabled": True}}, True),
        ({"fp16": {"enabled": True}}, True),
        ({"optimizer": "nvme"}, False),
        ({"optimizer": {"type": "AdamW"}}, True),
        ({"zero_optimisation": {"stage": 3}}, True),
        ({"fp16": {"loss_scale": 8}}, False),
        ({"fp16": {"loss_scal_window": 8}}, False),
        ({3: 4}, False),
        ({"gradient_clipping": 1.0, "gradient_accumulation_steps": 2}, False),
        ({}, False),
        ({"params": "host", "prams": 1}, False),
        ({"xyzzy": 1}, False),
    ],
)
def test_the_vocabulary_is_recognised(config: dict[str, Any], theirs: bool) -> None:
    assert is_deepspeed(config) is theirs


def test_a_mapping_and_a_file_give_what_was_read(tmp_path: Path) -> None:
    config = {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert load_config(config) == load_config(path) == read_deepspeed(config).tier
    with pytest.raises(ConfigError, match=r"belongs at the top level"):
        load_config({ZERO: {"aio": {}}})


def test_what_was_declared_in_both_vocabularies_alike_is_declared() -> None:
    config = load_config({ZERO: {}, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0})
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (4, 1.0)
    assert load_config({ZERO: {}}).gradient_clipping is None
    auto = load_config({ZERO: {}, "gradient_accumulation_steps": "auto"})
    assert auto.gradient_accumulation_steps is None


def test_every_line_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = {ZERO: {"stage": 2, "cpu_offload": True}, "wall_clock_breakdown": True}
    assert lines_of(caplog, config) == list(read_deepspeed(config).notes)
    assert len(caplog.records) == 2


def test_what_only_the_engine_does_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(
        caplog,
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "steps_per_print": 10,
            "optimizer": {"type": "AdamW"},
            "scheduler": {"type": "WarmupLR"},
        },
    )
    assert line == (
        "optimizer, scheduler, train_batch_size, train_micro_batch_size_per_gpu, steps_per_print, "
        "gradient_clipping (clip in your loop): done by tiermem.initialize only, not by a Runtime"
    )
    assert lines_of(caplog, {ZERO: {"stage": 3}}) == []


def test_a_runtime_trains_with_it(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        ZERO: {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False},
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0},
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 1e9,
        },
        "aio": {"block_size": 65536, "queue_depth": 4},
    }
    torch.manual_seed(0)
    with tiermem.Runtime(config) as runtime:
        model = tiermem.shard(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), runtime)
        optimizer = tiermem.optim.AdamW(model.parameters())
        before = tiermem.full_param(next(model.parameters()))
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        after = tiermem.full_param(next(model.parameters()))
        stats = runtime.stats()
    assert before.dtype == torch.bfloat16
    assert not torch.equal(before, after)
    assert stats.written_bytes > 0
    assert (stats.io.chunk_bytes, stats.io.read_depth, stats.io.write_depth) == (65536, 4, 4)
