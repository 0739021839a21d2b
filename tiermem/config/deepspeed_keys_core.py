"""The keys of a training step: batch sizes, precision, optimizer, exchange, I/O."""

from __future__ import annotations

from tiermem.config.deepspeed_key import Key, Kind, Role, no_op, refused

_FP32 = "gradients are summed in fp32, whatever is sent"
_DTYPES = (
    "not built: the blocks bf16 and fp16 choose the parameters' precision, buffers keep their own; "
    "leave the key out"
)
OWN_FIELDS = (
    "host_memory",
    "device_memory",
    "resident_memory",
    "update",
    "master",
    "device",
    "path_weights",
    "stripe_bytes",
    "num_threads",
    "malloc_mmap_threshold",
    "poison_released",
    "io",
)
"""tiermem's keys for what no key of DeepSpeed's says."""

_DERIVED = "from the other two and the number of ranks, else 1"


def _scale(name: str, default: float, meaning: str) -> Key:
    kind: Kind = "int" if isinstance(default, int) else "number"
    here = f"the same (`fp16.{name}`)"
    return Key(f"fp16.{name}", kind, default, Role.ACTS, meaning, here, auto=f"{default:g}", low=None)


_BATCH = (
    *(
        Key(
            name,
            "int",
            None,
            Role.ACTS,
            meaning,
            "kept for the engine (`batch`): train = micro x accumulation x ranks, checked",
            auto=_DERIVED,
            low=1,
            example=32,
        )
        for name, meaning in (
            ("train_batch_size", "samples of all ranks in one step"),
            ("train_micro_batch_size_per_gpu", "samples of one rank in one backward"),
            ("gradient_accumulation_steps", "backwards in one step"),
        )
    ),
    refused(
        "managed_gradient_accumulation",
        True,
        "whether the engine counts backwards itself",
        "the engine counts them; with tiermem.Runtime and a loop of your own you do",
    ),
    Key(
        "gradient_clipping",
        "number",
        0.0,
        Role.ACTS,
        "largest norm of all gradients together",
        "the same; 0 is none",
        auto="0 (none)",
        example=1.0,
    ),
    Key(
        "dataloader_drop_last",
        "bool",
        False,
        Role.ACTS,
        "leave out the last batch if it is smaller",
        "kept for the engine (`drop_last`)",
        auto="false",
    ),
    Key(
        "steps_per_print",
        "int",
        None,
        Role.ACTS,
        "steps between two lines of progress",
        "the engine logs a line (level INFO); 0, Infinity or left out, no lines",
        auto="no lines",
        example=100,
        infinite=0,
    ),
)

_PRECISION = (
    Key(
        "bf16",
        "object",
        None,
        Role.ACTS,
        "train in bf16",
        "below",
        example={"enabled": True},
        aliases=("bfloat16",),
    ),
    Key(
        "bf16.enabled",
        "bool",
        False,
        Role.ACTS,
        "whether",
        "`compute_dtype: bf16`; false for both bf16 and fp16: fp32; left out or auto: the model's own",
        auto="the model's own precision",
        example=True,
    ),
    no_op(
        "bf16.immediate_grad_update",
        False,
        "add gradients up as they are made",
        "they always are",
        fine=(True,),
    ),
    refused(
        "bf16.check_grad_overflow",
        False,
        "skip steps with gradients that are not finite",
        "not built for bf16; leave the key out",
    ),
    refused(
        "bf16.bf16_master_weights_and_grads",
        False,
        "no fp32 masters",
        "it would change the result: masters are fp32 (2 bytes beside a parameter); leave it out",
    ),
    refused(
        "bf16.bf16_optimizer_states",
        False,
        "moments in bf16",
        "it would change the result: moments are fp32; leave the key out",
    ),
    Key(
        "fp16",
        "object",
        None,
        Role.ACTS,
        "train in fp16 with scaled losses",
        "below",
        example={"enabled": True},
    ),
    Key(
        "fp16.enabled",
        "bool",
        False,
        Role.ACTS,
        "whether",
        "`compute_dtype: fp16` and `fp16`; see bf16.enabled",
        auto="the model's own precision",
        example=True,
    ),
    _scale("loss_scale", 0.0, "fixed scale; 0: dynamic"),
    _scale("initial_scale_power", 16, "the first dynamic scale is 2 to this"),
    _scale("loss_scale_window", 1000, "steps without overflow after which the scale doubles"),
    _scale("hysteresis", 2, "overflows before the scale is halved"),
    _scale("min_loss_scale", 1.0, "the least dynamic scale"),
    refused(
        "fp16.auto_cast",
        False,
        "cast inputs to fp16",
        "not built; cast them in your loop (x.half()) and leave the key out",
    ),
    refused(
        "fp16.consecutive_hysteresis",
        False,
        "count overflows in a row only",
        "it would change when the scale is halved and is not built; leave the key out",
    ),
    refused(
        "fp16.fp16_master_weights_and_grads",
        False,
        "no fp32 masters",
        "it would change the result: masters are fp32; leave the key out",
    ),
    no_op(
        "fp16.fused_mode",
        True,
        "one kernel for all parameters (of old)",
        "an update is one pass over memory",
    ),
    Key(
        "data_types",
        "object",
        None,
        Role.ACTS,
        "precision of what is not a parameter",
        "below",
        example={"grad_accum_dtype": "fp32"},
    ),
    Key(
        "data_types.grad_accum_dtype",
        "choice",
        None,
        Role.ACTS,
        "precision in which backwards of one step are added up",
        "`gradient_accumulation_dtype`: fp32, or the parameters' own; by default fp32",
        auto="fp32",
        choices=("fp32", "bf16", "fp16"),
        example="fp32",
    ),
    refused("data_types.param_dtype", None, "precision of parameters", _DTYPES),
    refused("data_types.buffer_dtype", None, "precision of buffers", _DTYPES),
)

_OPTIMIZERS = (
    Key(
        "optimizer",
        "object",
        None,
        Role.ACTS,
        "the optimizer to make",
        "kept for the engine (`optimizer`)",
        example={"type": "AdamW", "params": {"lr": 1e-3}},
    ),
    Key(
        "optimizer.type",
        "text",
        None,
        Role.ACTS,
        "its name",
        "AdamW, Adam and SGD (Adam is AdamW unless adam_w_mode is false, as in DeepSpeed), AdamW8bit "
        "and Adam8bit, and torch's Adagrad, Adadelta, Adamax, NAdam, RAdam and RMSprop",
        no_auto="give a name such as AdamW",
        example="AdamW",
    ),
    Key(
        "optimizer.params",
        "object",
        {},
        Role.ACTS,
        "its arguments",
        "see below; what is left out or auto has DeepSpeed's defaults",
        example={"lr": 1e-3},
    ),
    no_op(
        "optimizer.legacy_fusion",
        False,
        "the older fused fp16 optimizer",
        "an update is one pass over memory",
    ),
    Key(
        "scheduler",
        "object",
        None,
        Role.ACTS,
        "the learning rate's schedule",
        "kept for the engine (`scheduler`)",
        example={"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    ),
    Key(
        "scheduler.type",
        "text",
        None,
        Role.ACTS,
        "its name",
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest",
        no_auto="give a name such as WarmupLR",
        example="WarmupLR",
    ),
    Key(
        "scheduler.params",
        "object",
        {},
        Role.ACTS,
        "its arguments",
        "see below; what is left out or auto has DeepSpeed's defaults",
        example={"warmup_num_steps": 100},
    ),
    no_op(
        "zero_allow_untested_optimizer",
        False,
        "whether an optimizer of yours may be used",
        "any that is element-wise may; others are refused by name",
    ),
    Key(
        "tiermem",
        "object",
        None,
        Role.ACTS,
        "tiermem's own keys, for what DeepSpeed has none (DeepSpeed ignores the block)",
        f"{', '.join(f'`{name}`' for name in OWN_FIELDS)}: as in README's table of tiermem's own "
        f"configuration",
        no_auto="give an object",
        fields=OWN_FIELDS,
        example={"host_memory": "64GiB"},
    ),
    no_op(
        "zero_force_ds_cpu_optimizer",
        True,
        "insist on DeepSpeed's own optimizer on the host",
        "states are always updated by tiermem's own kernels",
    ),
)

_EXCHANGE = (
    Key(
        "communication_data_type",
        "choice",
        None,
        Role.PART,
        "precision in which gradients are sent",
        "fp32 or the parameters' own, which is what is sent; " + _FP32,
        auto="the parameters' own",
        choices=("fp32", "bf16", "fp16"),
        example="fp32",
    ),
    no_op(
        "seq_parallel_comm_data_type",
        "fp32",
        "the same, for sequence parallelism",
        _FP32,
        kind="choice",
        choices=("fp32", "bf16", "fp16"),
        aliases=("seq_parallel_communication_data_type",),
    ),
    refused(
        "gradient_allreduce_op",
        "mean",
        "mean or sum over ranks",
        "it would change the result: gradients are averaged; multiply your loss by the number of ranks",
        kind="choice",
        choices=("mean", "sum"),
    ),
    no_op("prescale_gradients", False, "divide before the sum over ranks", _FP32),
    no_op("gradient_predivide_factor", 1.0, "by how much", _FP32),
    refused(
        "sparse_gradients",
        False,
        "send embeddings' gradients as rows",
        "not built; leave the key out, and sparse=True out of embeddings",
    ),
    no_op(
        "disable_allgather",
        False,
        "broadcast updated parameters (of old)",
        "they are all-gathered",
    ),
)

CORE_KEYS: tuple[Key, ...] = (*_BATCH, *_PRECISION, *_OPTIMIZERS, *_EXCHANGE)
