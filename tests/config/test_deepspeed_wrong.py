"""All mistakes are in one message; unknown keys have the nearest, or the block they belong into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed_rig import acting, nested, problem, problems

from tiermem.config import load_config, read_deepspeed
from tiermem.errors import ConfigError

ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        (f"{ZERO}.stage3_param_persitance_threshold", f"{ZERO}.stage3_param_persistence_threshold"),
        (f"{ZERO}.stage3_param_persitence_threshold", f"{ZERO}.stage3_param_persistence_threshold"),
        (f"{ZERO}.cpu_offload_params", f"{ZERO}.cpu_offload_param"),
        (f"{ZERO}.stage3_prefetch_bucketsize", f"{ZERO}.stage3_prefetch_bucket_size"),
        (f"{ZERO}.Stage", f"{ZERO}.stage"),
        (f"{ZERO}.offload_optimizer.devise", f"{ZERO}.offload_optimizer.device"),
        ("aio.block_sizes", "aio.block_size"),
        ("zero_optimisation", ZERO),
        ("fp16.loss_scale_windows", "fp16.loss_scale_window"),
        ("train_micro_batch_size_per_cpu", "train_micro_batch_size_per_gpu"),
    ],
)
def test_a_misspelt_key_names_the_nearest(name: str, nearest: str) -> None:
    assert problem(nested(name, 1)).startswith(f"{name}: unknown key; did you mean '{nearest}'?")


@pytest.mark.parametrize(
    ("name", "home"),
    [
        (f"{ZERO}.aio", "aio belongs at the top level"),
        (f"{ZERO}.train_batch_size", "train_batch_size belongs at the top level"),
        ("stage3_max_live_parameters", f"stage3_max_live_parameters belongs into {ZERO}"),
        ("offload_optimizer", f"offload_optimizer belongs into {ZERO}"),
        ("overlap_comm", f"overlap_comm belongs into {ZERO}"),
        (f"{ZERO}.device", f"into {ZERO}.offload_param or into {ZERO}.offload_optimizer"),
        (f"{ZERO}.offload_optimizer.max_in_cpu", f"max_in_cpu belongs into {ZERO}.offload_param"),
        ("block_size", "block_size belongs into aio"),
    ],
)
def test_a_key_in_the_wrong_block_is_sent_to_the_right_one(name: str, home: str) -> None:
    config: dict[str, Any] = nested(name, {})
    config.setdefault(ZERO, {})
    assert home in problem(config)


def test_a_key_like_no_other_is_a_mistake_too() -> None:
    line = problem({ZERO: {}, "num-layers": 40})
    assert line == "num-layers: unknown key, and not near any of DeepSpeed's; leave it out"
    assert "says again" in problem({"fp16": {"fp16": True}})


def test_an_old_name_that_is_misspelt_says_what_is_written_today() -> None:
    line = problem(nested(f"{ZERO}.cpu_offload_params", True))
    assert line.endswith('Today that is zero_optimization.offload_param: {"device": "cpu"}')


@pytest.mark.parametrize("mark", ["_comment", "_zero_comment", "#", "# why", "//", "//why"])
def test_comments_in_keys_are_comments_everywhere(mark: str) -> None:
    config = {
        mark: "x",
        ZERO: {mark: 1, "stage": 3, "offload_param": {mark: [], "device": "cpu"}},
        "optimizer": {mark: 1, "type": "AdamW", "params": {mark: 1, "lr": 0.1}},
        "wandb": {mark: 1, "enabled": False},
    }
    plain = {
        ZERO: {"stage": 3, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    assert acting(read_deepspeed(config)) == acting(read_deepspeed(plain))


def test_all_mistakes_are_in_one_message_a_line_each() -> None:
    lines = problems(
        {
            ZERO: {
                "stage": 3,
                "stag": 3,
                "offload_optimizer": True,
                "offload_param": {"device": "nvme"},
                "zero_quantized_weights": True,
                "reduce_bucket_size": "much",
            },
            "bf16": {"enabled": True},
            "fp16": {"enabled": True},
            "aio": {"queue_depth": 0, "block_size": 100},
            "optimizer": {"type": "Lamb"},
            "scheduler": {"type": "WarmupDecayLR"},
            "wandb": {"enabled": True, "projct": "x"},
            "amp": {"enabled": True},
            3: 4,
        }
    )
    assert [line.partition(": ")[0] for line in lines] == [
        f"{ZERO}.stag",
        f"{ZERO}.offload_optimizer",
        f"{ZERO}.zero_quantized_weights",
        f"{ZERO}.reduce_bucket_size",
        "wandb.projct",
        "amp",
        "(whole)",
        "optimizer.type",
        "scheduler.params.total_num_steps",
        "bf16.enabled",
        f"{ZERO}.offload_param.nvme_path",
        "aio.block_size",
        "aio.queue_depth",
    ]


def test_both_vocabularies_in_one_mapping_is_a_mistake() -> None:
    for config in ({ZERO: {"stage": 3}, "params": "nvme"}, {"fp16": {"enabled": True}, "paths": ["."]}):
        for read in (load_config, read_deepspeed):
            with pytest.raises(ConfigError, match=r"tiermem's keys \(pa.*DeepSpeed's \(.*not both"):
                read(config)


@pytest.mark.parametrize("source", [None, 3, ["zero_optimization"]])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="a mapping or a path"):
        read_deepspeed(source)


def test_a_file_is_read_and_its_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3,}, // the rest\n}')
    assert read_deepspeed(path).tier.stage == read_deepspeed(str(path)).tier.stage == 3
    path.write_text("[]")
    with pytest.raises(ConfigError, match="a mapping or a path"):
        read_deepspeed(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_deepspeed(tmp_path / "none.json")


def test_two_precisions_hide_no_other_mistake() -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": 99}}
    lines = problems(both)
    assert [line.partition(":")[0] for line in lines] == ["bf16.enabled", "fp16.initial_scale_power"]
