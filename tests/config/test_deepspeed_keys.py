"""Each key of the table does what its role says: it acts, says why not, or is refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_rig import acting, merged, nested, problem, problems

from tiermem.config import read_deepspeed
from tiermem.config.deepspeed_key import Key, Role
from tiermem.config.deepspeed_keys import KEYS, TABLE
from tiermem.config.deepspeed_value import parse

STAGE3 = {"zero_optimization": {"stage": 3}}
NVME = {"device": "nvme", "nvme_path": "/nvme"}

# A configuration in which the key matters, and a value that is not what acts without the key.
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "train_batch_size": ({}, 32),
    "train_micro_batch_size_per_gpu": ({}, 4),
    "gradient_accumulation_steps": ({}, 2),
    "gradient_clipping": ({}, 1.0),
    "dataloader_drop_last": ({}, True),
    "steps_per_print": ({}, 10),
    "bf16.enabled": ({}, True),
    "fp16.enabled": ({}, True),
    "fp16.loss_scale": ({"fp16": {"enabled": True}}, 128),
    "fp16.initial_scale_power": ({"fp16": {"enabled": True}}, 12),
    "fp16.loss_scale_window": ({"fp16": {"enabled": True}}, 100),
    "fp16.hysteresis": ({"fp16": {"enabled": True}}, 3),
    "fp16.min_loss_scale": ({"fp16": {"enabled": True}}, 4),
    "data_types.grad_accum_dtype": ({"bf16": {"enabled": True}}, "bf16"),
    "optimizer.type": ({}, "AdamW"),
    "optimizer.params": ({"optimizer": {"type": "AdamW"}}, {"lr": 0.5}),
    "scheduler.type": ({}, "WarmupLR"),
    "scheduler.params": ({"scheduler": {"type": "WarmupLR"}}, {"warmup_num_steps": 7}),
    "tiermem": ({}, {"host_memory": 1 << 20}),
    "zero_optimization.stage": ({}, 2),
    "zero_optimization.contiguous_gradients": ({}, False),
    "zero_optimization.overlap_comm": ({}, False),
    "zero_optimization.reduce_bucket_size": ({}, 1000),
    "zero_optimization.allgather_bucket_size": ({}, 1000),
    "zero_optimization.sub_group_size": ({}, 100_000),
    "zero_optimization.offload_param.device": (STAGE3, "cpu"),
    "zero_optimization.offload_param.nvme_path": (
        nested("zero_optimization", {"stage": 3, "offload_param": NVME}),
        "/other",
    ),
    "zero_optimization.offload_param.pin_memory": (STAGE3, False),
    "zero_optimization.offload_param.max_in_cpu": (
        nested("zero_optimization", {"stage": 3, "offload_param": NVME}),
        1000,
    ),
    "zero_optimization.offload_optimizer.device": ({}, "cpu"),
    "zero_optimization.offload_optimizer.nvme_path": (
        nested("zero_optimization", {"stage": 1, "offload_optimizer": NVME}),
        ["/one", "/two"],
    ),
    "zero_optimization.offload_optimizer.pin_memory": ({}, False),
    "zero_optimization.stage3_prefetch_bucket_size": (STAGE3, 1000),
    "zero_optimization.stage3_param_persistence_threshold": (STAGE3, 1000),
    "zero_optimization.stage3_max_live_parameters": (STAGE3, 1000),
    "zero_optimization.stage3_max_reuse_distance": (STAGE3, 1000),
    "zero_optimization.leaf_module.classes": (STAGE3, ["Experts"]),
    "zero_optimization.leaf_module.names": (STAGE3, ["blocks.0"]),
    "zero_optimization.leaf_module.name_suffixes": (STAGE3, ["experts"]),
    "aio.block_size": ({}, 1 << 20),
    "aio.queue_depth": ({}, 8),
}

# What is refused, or has no effect, and something that it would have to do.
ASKS: dict[str, Any] = {
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "activation_checkpointing": {"partition_activations": True},
    "tensor_parallel": {"autotp_size": 2},
    "pipeline": {"stages": 2},
    "weight_quantization": {"quantized_initialization": {}},
    "sparse_attention": {"mode": "fixed"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "compile": {"deepcompile": True},
    "timers": {"throughput": {"enabled": True}},
    "datastates_ckpt": {"host_cache_size": 1},
    "checkpoint.parallel_write": {"pipeline_stage": True},
    "checkpoint.writer": {"type": "fast"},
    "gradient_allreduce_op": "sum",
    "seq_parallel_comm_data_type": "bf16",
    "aio.io_backend": "posix",
    "checkpoint.tag_validation": "Fail",
    "log_level": "info",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "data_types.param_dtype": "bf16",
    "data_types.buffer_dtype": "bf16",
}
LEAVES = [key for key in KEYS if not TABLE.children(key.name)]


def asking(key: Key) -> Any:
    if key.name in ASKS:
        return ASKS[key.name]
    if key.kind == "object":
        return {"enabled": True}
    if key.kind == "bool":
        return not key.fine[0]
    return 0.5 if key.kind == "number" else 77


# Gradients are summed in fp32 for each value that is accepted: see test_deepspeed_meaning.
SAME = {"communication_data_type"}


def of_role(*roles: Role) -> list[Any]:
    return [
        pytest.param(key, id=key.name) for key in LEAVES if key.role in roles and key.name not in SAME
    ]


def test_every_name_is_one_key() -> None:
    spellings = [name for key in KEYS for name in (key.name, *key.aliases, *key.also)]
    spellings += TABLE.legacy
    assert len(spellings) == len(set(spellings))
    for key in KEYS:
        assert not key.block or TABLE.keys[key.block].kind == "object", key.name


@pytest.mark.parametrize("key", of_role(Role.ACTS, Role.PART))
def test_a_key_that_acts_changes_what_is_done(key: Key) -> None:
    base, value = CHANGES[key.name]
    before, after = read_deepspeed(base), read_deepspeed(merged(base, nested(key.name, value)))
    assert acting(before) != acting(after)
    if key.kind != "object":
        assert after.effective[key.name].given == value
        assert key.name not in before.effective or before.effective[key.name].given != value


@pytest.mark.parametrize("key", of_role(Role.NO_OP))
def test_a_no_op_is_accepted_and_one_line_says_why(key: Key) -> None:
    plain = read_deepspeed(STAGE3)
    config = read_deepspeed(merged(STAGE3, nested(key.name, asking(key))))
    assert acting(config) == acting(plain)
    (note,) = config.notes
    assert note.startswith(f"{key.name}: ")
    assert key.here in note


@pytest.mark.parametrize("key", of_role(Role.NO_OP))
def test_a_no_op_that_asks_for_what_happens_anyway_needs_no_line(key: Key) -> None:
    for value in key.fine or ([{}, {"enabled": False}] if key.kind == "object" and key.is_on else []):
        if key.fields and "enabled" not in key.fields:
            continue
        assert read_deepspeed(merged(STAGE3, nested(key.name, value))).notes == (), value


@pytest.mark.parametrize("key", of_role(Role.REFUSED))
def test_what_cannot_be_done_is_refused_with_a_remedy(key: Key) -> None:
    line = problem(merged(STAGE3, nested(key.name, asking(key))))
    assert line.startswith(f"{key.name}: ")
    assert line.endswith(key.here)
    assert any(word in line for word in ("leave", "use", "write", "multiply", "you do"))


@pytest.mark.parametrize("key", of_role(Role.REFUSED))
def test_what_is_refused_is_accepted_while_it_asks_for_nothing(key: Key) -> None:
    quiet: list[Any] = [None, *key.fine]
    if key.kind == "object":
        quiet += [{}, dict.fromkeys(key.fields, False) if key.fields else {"enabled": False}]
        quiet += [dict.fromkeys(key.fields)]
        quiet = [value for value in quiet if key.name not in ("sparse_attention",) or not value]
        if key.is_on is not None:
            quiet = [value for value in quiet if value is None or not key.is_on(value)]
    for value in quiet:
        config = read_deepspeed(merged(STAGE3, nested(key.name, value)))
        assert acting(config) == acting(read_deepspeed(STAGE3))


@pytest.mark.parametrize("key", [pytest.param(key, id=key.name) for key in KEYS])
def test_defaults_and_examples_are_values(key: Key) -> None:
    for value in (key.default, key.example, *key.fine):
        if value is not None:
            parse(key, list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("key", [pytest.param(key, id=key.name) for key in LEAVES])
def test_auto_means_something_or_is_a_mistake_that_says_what_to_give(key: Key) -> None:
    config = nested(key.name, "auto")
    if key.kind == "object":
        assert "must be an object" in problem(config) or '"auto"' in problem(config)
    elif key.auto is None:
        assert any('"auto" cannot be known here; ' in line for line in problems(config))
    else:
        config = merged(STAGE3, config)
        assert any(f"{key.name}: {key.auto}" in note for note in read_deepspeed(config).notes)
