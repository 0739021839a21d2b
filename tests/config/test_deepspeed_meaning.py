"""What each acting key becomes in tiermem's own vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed_rig import effective, merged, problem

from tiermem.config import BatchSizes, LeafModules, LossScaleConfig, TierConfig, read_deepspeed
from tiermem.errors import ConfigError

ZERO = "zero_optimization"
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {ZERO: {"stage": stage, **keys}}


def tier(*parts: dict[str, Any], **more: Any) -> TierConfig:
    return read_deepspeed(merged(*parts), **more).tier


def test_nothing_is_stage_0_on_the_device() -> None:
    config = tier({})
    assert (config.stage, config.params, config.optimizer) == (0, "device", "device")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("device", "where"), [("none", "device"), ("cpu", "host"), ("nvme", "nvme")])
def test_states_are_placed_at_every_stage(stage: int, device: str, where: str) -> None:
    config = tier(zero(stage, offload_optimizer={"device": device, "nvme_path": "/d"}))
    assert (config.stage, config.optimizer, config.params) == (stage, where, "device")
    assert config.paths == ((Path("/d"),) if device == "nvme" else ())


@pytest.mark.parametrize(("device", "where"), [("none", "device"), ("cpu", "host"), ("nvme", "nvme")])
def test_parameters_are_placed_at_stage_3(device: str, where: str) -> None:
    assert tier(zero(offload_param={"device": device, "nvme_path": "/d"})).params == where


def test_parameters_stay_below_stage_3_and_one_line_says_so() -> None:
    offload = {"device": "nvme", "nvme_path": "/d", "pin_memory": True, "max_in_cpu": 5}
    config = read_deepspeed(zero(2, offload_param=offload, stage3_max_live_parameters=5))
    assert config.tier == read_deepspeed(zero(2)).tier
    (note,) = config.notes
    assert note.endswith("no effect below stage 3")
    for key in (*(f"offload_param.{name}" for name in offload), "stage3_max_live_parameters"):
        assert f"{ZERO}.{key}" in note
        assert f"{ZERO}.{key}" not in config.effective


def test_paths_of_both_blocks_are_put_together_in_order() -> None:
    def paths(param: Any, optimizer: Any) -> tuple[list[str], tuple[str, ...]]:
        config = read_deepspeed(
            zero(
                offload_param={"device": "nvme", "nvme_path": param},
                offload_optimizer={"device": "nvme", "nvme_path": optimizer},
            )
        )
        return [str(path) for path in config.tier.paths], config.notes

    assert paths("/a", "/a") == (["/a"], ())
    both, (note,) = paths(["/b", "/c/"], "/a")
    assert both == ["/a", "/b", "/c"]
    assert note.endswith("all that is on NVMe is striped over /a, /b, /c")
    assert paths("rel/ative", "~/x")[0] == [str(Path("~/x").expanduser()), "rel/ative"]


def test_a_path_without_nvme_has_no_effect() -> None:
    config = read_deepspeed(zero(offload_optimizer={"device": "cpu", "nvme_path": "/d"}))
    assert config.tier.paths == ()
    assert config.notes == (f'{ZERO}.offload_optimizer.nvme_path: no effect with device "cpu"',)
    line = problem(zero(1, offload_optimizer={"device": "nvme"}))
    assert line.startswith(f'{ZERO}.offload_optimizer.nvme_path: missing; device "nvme" needs')


@pytest.mark.parametrize(
    ("param", "optimizer", "pinned"),
    [
        (None, None, True),
        (True, False, True),
        (False, True, True),
        (False, False, False),
        (None, False, False),
        (False, None, False),
    ],
)
def test_memory_is_locked_if_either_block_says_so(param: Any, optimizer: Any, pinned: bool) -> None:
    config = tier(
        zero(offload_param={"pin_memory": param}, offload_optimizer={"pin_memory": optimizer})
    )
    assert config.pin_memory is pinned


@pytest.mark.parametrize(
    ("given", "sets", "acts"),
    [
        (1e14, None, 4194304),
        (4194304, None, 4194304),
        (4194303, 4194303, 4194303),
        (5000, 5000, 5000),
        (4095, 4096, 4096),
        (0, 4096, 4096),
    ],
)
def test_sub_group_size_is_an_upper_bound(given: float, sets: int | None, acts: int) -> None:
    config = read_deepspeed(zero(sub_group_size=given))
    assert config.tier.sub_group_numel == sets
    assert effective(config)[f"{ZERO}.sub_group_size"] == acts


def test_sizes_in_elements() -> None:
    config = tier(
        zero(
            reduce_bucket_size=0,
            allgather_bucket_size=7,
            stage3_max_live_parameters=0,
            stage3_max_reuse_distance=5,
            stage3_param_persistence_threshold=3,
        )
    )
    assert (config.reduce_bucket_numel, config.allgather_bucket_numel) == (1, 7)
    assert (config.max_live_numel, config.max_reuse_numel) == (0, 5)
    assert config.persistence_threshold_numel == 3
    assert tier(zero()).persistence_threshold_numel == 100_000  # DeepSpeed's default


@pytest.mark.parametrize(
    ("precision", "itemsize", "nbytes"),
    [
        (BF16, None, 2),
        (FP16, None, 2),
        (FP16, 4, 2),
        ({"bf16": {"enabled": False}}, 2, 4),
        ({}, None, 4),
        ({}, 2, 2),
    ],
)
def test_sizes_in_bytes_are_of_the_parameters(
    precision: dict[str, Any], itemsize: int | None, nbytes: int
) -> None:
    keys = {"offload_param": {"device": "nvme", "nvme_path": "/d", "max_in_cpu": 1000}}
    config = tier(precision, zero(stage3_prefetch_bucket_size=100, **keys), itemsize=itemsize)
    assert (config.prefetch_bytes, config.resident_memory) == (100 * nbytes, 1000 * nbytes)


def test_max_in_cpu_needs_parameters_on_nvme() -> None:
    config = read_deepspeed(zero(offload_param={"device": "cpu", "max_in_cpu": 1000}))
    assert config.tier.resident_memory is None
    assert config.notes == (
        f'{ZERO}.offload_param.max_in_cpu: no effect unless {ZERO}.offload_param.device is "nvme"',
    )


def test_io() -> None:
    config = tier({"aio": {"block_size": 262144, "queue_depth": 32}})
    assert config.io.given == {"chunk_bytes": 262144, "read_depth": 32, "write_depth": 32}
    assert tier({"aio": {"thread_count": 2}}).io.given == {}


@pytest.mark.parametrize(
    ("bf16", "fp16", "precision"),
    [
        (None, None, None),
        (True, None, "bf16"),
        (None, True, "fp16"),
        (True, False, "bf16"),
        (True, "auto", "bf16"),
        (False, "auto", None),
        ("auto", "auto", None),
        ("auto", None, None),
        (False, None, "fp32"),
        (None, False, "fp32"),
        (False, False, "fp32"),
    ],
)
def test_precision(bf16: Any, fp16: Any, precision: str | None) -> None:
    config = read_deepspeed({"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}})
    assert config.precision == config.tier.compute_dtype == precision


def test_loss_scaling_is_that_of_the_block() -> None:
    block = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3}
    assert tier({"fp16": block}).fp16 == LossScaleConfig(initial_scale_power=12, hysteresis=3)
    assert tier(FP16).fp16 == LossScaleConfig()
    assert tier(BF16, {"fp16": {"enabled": False, "loss_scale": 8}}).fp16 is None
    fixed = {"enabled": True, "loss_scale": 512, "min_loss_scale": 0, "initial_scale_power": 99}
    assert tier({"fp16": fixed}).fp16 == LossScaleConfig(loss_scale=512)
    dynamic = {"enabled": True, "min_loss_scale": 0}
    assert problem({"fp16": dynamic}).startswith("fp16.min_loss_scale: ")


def test_loss_scaling_that_is_left_to_the_model_acts_if_it_is_fp16() -> None:
    config = read_deepspeed({"fp16": {"enabled": "auto", "loss_scale": 512, "min_loss_scale": 0}})
    batch = config.batch.resolve(1)
    assert config.tier.fp16 is None
    assert config.tier_for(batch, model_precision="bf16").fp16 is None
    assert config.tier_for(batch, model_precision="fp16").fp16 == LossScaleConfig(loss_scale=512)
    wrong = {"fp16": {"enabled": "auto", "min_loss_scale": 0}}
    assert problem(wrong).startswith("fp16.min_loss_scale: ")


@pytest.mark.parametrize(
    ("precision", "dtype", "becomes"),
    [(BF16, "fp32", "fp32"), (BF16, "bf16", "param"), (FP16, "fp16", "param"), ({}, "bf16", "param")],
)
def test_gradients_are_added_up_in_fp32_or_the_parameters_precision(
    precision: dict[str, Any], dtype: str, becomes: str
) -> None:
    config = tier(precision, {"data_types": {"grad_accum_dtype": dtype}})
    assert config.gradient_accumulation_dtype == becomes
    assert tier(precision).gradient_accumulation_dtype == "fp32"


@pytest.mark.parametrize("name", ["communication_data_type", "data_types"])
def test_another_precision_for_gradients_is_refused(name: str) -> None:
    value: Any = {"grad_accum_dtype": "fp16"} if name == "data_types" else "fp16"
    assert "fp16 is neither fp32 nor the parameters' bf16" in problem(merged(BF16, {name: value}))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_gradients_are_sent_in_changes_nothing(dtype: str) -> None:
    assert tier(BF16, {"communication_data_type": dtype}) == tier(BF16)


def test_micro_steps_and_clipping_are_declared_for_resolved_sizes() -> None:
    config = read_deepspeed({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, **zero()})
    assert config.batch == BatchSizes(32, 4, None)
    assert config.tier.gradient_accumulation_steps is None
    declared = config.tier_for(config.batch.resolve(2))
    assert (declared.gradient_accumulation_steps, declared.gradient_clipping) == (4, 0.0)
    assert declared.effective_update == "deferred"
    assert config.tier_for(config.batch.resolve(8)).effective_update == "deferred"
    with pytest.raises(ConfigError, match="not resolved"):
        config.tier_for(config.batch)


def test_what_is_kept_for_the_engine() -> None:
    config = read_deepspeed(
        {
            "gradient_clipping": "1.0",
            "steps_per_print": 1e5,
            "dataloader_drop_last": True,
            **zero(leaf_module={"classes": "Experts", "names": ["a", "b"]}),
        }
    )
    assert (config.gradient_clipping, config.steps_per_print) == (1.0, 100_000)
    assert config.drop_last
    assert config.leaf_modules == LeafModules(("Experts",), ("a", "b"), ())
    assert read_deepspeed({}).leaf_modules is None
    assert read_deepspeed({"steps_per_print": 0}).steps_per_print is None


def test_the_block_tiermem_has_its_own_keys() -> None:
    config = read_deepspeed(
        {
            "aio": {"queue_depth": 4},
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0,
            **zero(offload_optimizer={"device": "cpu"}),
            "tiermem": {
                "_comment": "for this machine",
                "host_memory": "64MiB",
                "update": "backward",
                "io": {"backend": "threads"},
            },
        }
    )
    assert config.tier.host_memory == 64 << 20
    assert config.tier.effective_update == "backward"
    assert (config.tier.io.backend, config.tier.io.read_depth) == ("threads", 4)
    assert str(config.effective["tiermem.host_memory"]) == '"64MiB"'


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"hostmemory": 1}, "tiermem.hostmemory: unknown key; did you mean 'host_memory'?"),
        ({"host_memory": "lots"}, "tiermem.host_memory: must be a size"),
        (True, "tiermem: "),
        ({"gradient_clipping": 1.0}, "tiermem.gradient_clipping: unknown key; valid: host_memory"),
        ({"params": "nvme"}, "tiermem.params: unknown key"),
    ],
)
def test_mistakes_in_the_block_tiermem(own: Any, says: str) -> None:
    assert problem({"tiermem": own}).startswith(says)
