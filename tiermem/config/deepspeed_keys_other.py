"""The keys around ZeRO: I/O, activations, other kinds of parallelism, what only observes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiermem.config.deepspeed_key import (
    Key,
    Role,
    anything_enabled,
    anything_true,
    enabled,
    no_op,
    not_empty,
    refused,
)

_AIO = (
    Key(
        "aio",
        "object",
        None,
        Role.ACTS,
        "how drives are driven",
        "below; what is left out comes from a saved profile of the drives, if there is one",
        example={"block_size": 1048576},
    ),
    Key(
        "aio.block_size",
        "int",
        1_048_576,
        Role.ACTS,
        "bytes in one request",
        "`io.chunk_bytes`: a multiple of 4096, at most 1 GiB; left out, 2 MiB",
        auto="2097152",
        example=1_048_576,
    ),
    Key(
        "aio.queue_depth",
        "int",
        8,
        Role.ACTS,
        "requests in flight",
        "`io.read_depth` and `io.write_depth`, for each path: 1 to 1024; left out, 16",
        auto="16",
        example=8,
    ),
    no_op(
        "aio.intra_op_parallelism",
        1,
        "threads for one request",
        "one thread for each path keeps a drive busy; more paths are the way to more bandwidth",
        also=("aio.thread_count",),
    ),
    no_op(
        "aio.single_submit",
        False,
        "submit requests one by one",
        "what is ready is submitted at once; the transfers are the same",
    ),
    no_op(
        "aio.overlap_events",
        True,
        "submit before earlier requests have ended",
        "always on",
    ),
    no_op(
        "aio.use_gds",
        False,
        "move bytes between drive and device directly",
        "there is no such path yet: bytes go through host memory",
    ),
    no_op(
        "aio.io_backend",
        "async_io",
        "asynchronous or plain I/O",
        "the best backend that works is chosen; tiermem's own configuration has `io.backend`",
    ),
)

_CHECKPOINT_REMEDY = (
    "not built yet; wrap blocks in torch.utils.checkpoint.checkpoint, which works here as it is, and "
    "leave the block out"
)
_CHANGES = "it would change the result and is not built; leave the block out"


def _splits_tensors(block: Mapping[str, Any]) -> bool:
    return str(block.get("autotp_size", 0)) not in ("0", "1", "auto", "None")


def _has_stages(block: Mapping[str, Any]) -> bool:
    return str(block.get("stages", 1)) not in ("0", "1", "auto", "None")


def _compiles(block: Mapping[str, Any]) -> bool:
    return anything_true({key: block.get(key) for key in ("enabled", "deepcompile")})


def _object(name: str, meaning: str, here: str, **more: Any) -> Key:
    return refused(name, None, meaning, here, **({"kind": "object", "is_on": enabled} | more))


_REFUSED = (
    _object(
        "activation_checkpointing",
        "recompute activations, share them out, move them to the host",
        _CHECKPOINT_REMEDY,
        is_on=anything_true,
        fields=(
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        ),
    ),
    _object(
        "tensor_parallel",
        "split layers over ranks",
        "use torch's parallelize_module(model, mesh['tp'], plan), then tiermem.shard(model, rt, "
        "mesh=mesh['dp']), and leave the block out",
        is_on=_splits_tensors,
    ),
    _object(
        "expert_parallel",
        "share experts out over ranks",
        "not built: stage 3 shares their parameters out; leave the block out",
    ),
    refused(
        "sequence_parallel_size",
        1,
        "ranks that share a sequence",
        "not built; leave the key out",
        fine=(0, 1),
    ),
    _object(
        "pipeline",
        "settings of pipeline modules",
        "there is no pipeline engine; leave the block out (model_mesh of tiermem.shard names stages of "
        "your own)",
        is_on=_has_stages,
    ),
    refused(
        "use_data_before_expert_parallelism",
        False,
        "how ranks are numbered for experts",
        "expert parallelism is not built; leave the key out",
    ),
    _object("amp", "NVIDIA apex's mixed precision", "use the block bf16 or fp16"),
    _object(
        "torch_autocast",
        "run forward in torch.autocast",
        "write torch.autocast around forward in your loop, which works here as it is",
    ),
    _object("compression_training", "quantize, prune", _CHANGES, is_on=anything_enabled),
    _object("quantize_training", "quantize while training", _CHANGES),
    _object("weight_quantization", "quantize for inference", _CHANGES, is_on=not_empty),
    _object("sparse_attention", "attention of blocks", _CHANGES, is_on=not_empty),
    _object("progressive_layer_drop", "leave layers out", _CHANGES),
    _object("curriculum_learning", "order samples by difficulty", _CHANGES),
    _object("data_efficiency", "choose samples, drop tokens", _CHANGES),
    _object("eigenvalue", "curvature, for quantization", _CHANGES),
    _object(
        "elasticity",
        "batch sizes for changing numbers of ranks",
        "not built: batch sizes are those that you give; leave the block out",
    ),
    _object(
        "autotuning",
        "search for a configuration",
        "not built; `tiermem tune PATH` measures drives; leave the block out",
    ),
    _object(
        "hybrid_engine",
        "other kernels for generation",
        "not built; model.generate works as it is; leave the block out",
    ),
    _object(
        "compile",
        "compile the model",
        "compile blocks yourself (block.compile()) after tiermem.shard, and leave the block out",
        is_on=_compiles,
    ),
)

_MONITOR = (
    "nothing is reported to it: rt.stats() and the optimizer have the numbers; log them in your loop"
)
_TIMES = "time is not taken apart here: torch.profiler shows it"


def _observer(name: str, meaning: str, why: str, fields: tuple[str, ...] = ()) -> Key:
    return no_op(name, None, meaning, why, kind="object", is_on=enabled, fields=fields)


_OBSERVE = (
    _observer("wandb", "report to Weights & Biases", _MONITOR, ("enabled", "group", "team", "project")),
    _observer("tensorboard", "report to TensorBoard", _MONITOR, ("enabled", "output_path", "job_name")),
    _observer("csv_monitor", "report to files", _MONITOR, ("enabled", "output_path", "job_name")),
    _observer(
        "comet",
        "report to Comet",
        _MONITOR,
        (
            "enabled",
            "workspace",
            "project",
            "samples_log_interval",
            "experiment_name",
            "api_key",
            "experiment_key",
            "online",
            "mode",
        ),
    ),
    _observer(
        "comms_logger",
        "log collectives",
        "collectives are not logged one by one",
        ("enabled", "verbose", "prof_all", "debug", "prof_ops"),
    ),
    _observer(
        "flops_profiler",
        "count operations",
        _TIMES,
        (
            "enabled",
            "recompute_fwd_factor",
            "profile_step",
            "module_depth",
            "top_modules",
            "detailed",
            "output_file",
        ),
    ),
    no_op("wall_clock_breakdown", False, "time forward, backward and step", _TIMES),
    no_op("memory_breakdown", False, "log memory in use", "rt.stats() has what is in use"),
    no_op("timers", None, "how times are taken", _TIMES, kind="object", is_on=anything_enabled),
    no_op("dump_state", False, "print the engine's state", "rt.stats() has it"),
    no_op("log_level", None, "how much is logged", "logging.getLogger('tiermem').setLevel does it"),
    no_op("vocabulary_size", None, "warn of unaligned sizes", "only a warning", kind="int"),
    no_op("graph_harvesting", False, "capture device graphs", "none are captured"),
    no_op("disable_python_gc", False, "pause garbage collection", "gc.disable() does it"),
)

_FILES = "tiermem's checkpoints have a format of their own"

_CHECKPOINTS = (
    Key(
        "checkpoint",
        "object",
        None,
        Role.PART,
        "how checkpoints are written",
        "below",
        example={"tag_validation": "Warn"},
    ),
    no_op("checkpoint.tag_validation", "Warn", "compare ranks' tags", _FILES),
    refused(
        "checkpoint.load_universal",
        False,
        "load DeepSpeed's universal checkpoints",
        "not built; states load on any number of ranks anyway; leave the key out",
    ),
    no_op("checkpoint.use_node_local_storage", False, "files on each machine", _FILES),
    no_op("checkpoint.parallel_write", None, "share out writing", _FILES, kind="object"),
    no_op("checkpoint.writer", None, "how files are written", _FILES, kind="object"),
    _observer("nebula", "a checkpoint service", _FILES),
    no_op("datastates_ckpt", None, "a checkpoint service", _FILES, kind="object"),
)

OTHER_KEYS: tuple[Key, ...] = (*_AIO, *_REFUSED, *_OBSERVE, *_CHECKPOINTS)
