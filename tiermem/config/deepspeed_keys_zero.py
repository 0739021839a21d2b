"""The keys of ``zero_optimization``."""

from __future__ import annotations

from tiermem.config.deepspeed_key import Key, Role, no_op, not_empty, refused
from tiermem.config.deepspeed_keys_offload import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM

_ZERO = "zero_optimization"
_ZEROPP = "ZeRO++ is not built yet; leave the key out"
_MICS = "MiCS is not built; leave the key out"
_FLAT = "parameters are all-gathered into one flat buffer, without copies"

_STAGES = (
    Key(
        _ZERO,
        "object",
        {},
        Role.ACTS,
        "ZeRO's settings",
        "below; true and false are stage 1 and 0, as of old",
        example={"stage": 3},
    ),
    Key(
        f"{_ZERO}.stage",
        "int",
        0,
        Role.ACTS,
        "what is shared out over ranks: nothing, optimizer states, also gradients, also parameters",
        "the same (`stage`)",
        no_auto="give 0, 1, 2 or 3",
        high=3,
        example=3,
    ),
)

_EXCHANGE = (
    Key(
        f"{_ZERO}.contiguous_gradients",
        "bool",
        True,
        Role.ACTS,
        "copy gradients into one buffer as they are made",
        "the same, over several ranks (`contiguous_gradients`)",
        auto="true",
    ),
    Key(
        f"{_ZERO}.overlap_comm",
        "bool",
        None,
        Role.ACTS,
        "exchange while computing; DeepSpeed's default is true at stage 3 only",
        "the same (`overlap_comm`), by default true at every stage",
        auto="true",
    ),
    Key(
        f"{_ZERO}.reduce_bucket_size",
        "int",
        500_000_000,
        Role.ACTS,
        "elements of gradients reduced at a time",
        "`reduce_bucket_numel`: at most these; left out, a whole block's. 0 counts as 1",
        auto="a whole block's",
        example=500_000_000,
    ),
    Key(
        f"{_ZERO}.allgather_bucket_size",
        "int",
        500_000_000,
        Role.ACTS,
        "elements of parameters gathered at a time",
        "`allgather_bucket_numel`: at most these; left out, a whole block's. 0 counts as 1",
        auto="a whole block's",
        example=500_000_000,
    ),
    no_op(
        f"{_ZERO}.reduce_scatter",
        True,
        "reduce to the owner, not to all",
        "gradients go to their owner at every stage; the sums are the same",
    ),
    no_op(
        f"{_ZERO}.allgather_partitions",
        True,
        "all-gather updated parameters, or broadcast them",
        "they are all-gathered",
    ),
    no_op(
        f"{_ZERO}.use_multi_rank_bucket_allreduce",
        True,
        "one all-reduce for the buckets of several ranks",
        "ranks exchange their parts of a bucket in one message each",
    ),
    no_op(
        f"{_ZERO}.round_robin_gradients",
        False,
        "ranks copy gradients to the host in turns",
        "each rank copies its own share",
    ),
    no_op(
        f"{_ZERO}.ignore_unused_parameters",
        True,
        "accept parameters without a gradient",
        "they are always accepted",
    ),
    no_op(
        f"{_ZERO}.compute_grad_norm",
        True,
        "compute the gradient norm at each step",
        "it is computed where clipping or loss scaling needs it",
    ),
    no_op(
        f"{_ZERO}.parameter_alignment",
        False,
        "align each parameter in its flat buffer",
        "parameters in a block's buffer are always aligned",
    ),
)

_STAGE3 = (
    Key(
        f"{_ZERO}.sub_group_size",
        "int",
        1_000_000_000,
        Role.ACTS,
        "elements updated at a time",
        "an upper bound: below 4,194,304 it sets `sub_group_numel` (at least 4096); above, slices have "
        "up to that, as the budget allows",
        auto="as the budget allows",
        example=1_000_000_000,
    ),
    Key(
        f"{_ZERO}.stage3_prefetch_bucket_size",
        "int",
        50_000_000,
        Role.ACTS,
        "elements fetched ahead of use",
        "`prefetch_bytes`, with 2 bytes an element in bf16 and fp16, else 4; left out, as the budget "
        "allows",
        auto="as the budget allows",
        example=50_000_000,
        stage3=True,
        aliases=(f"{_ZERO}.prefetch_bucket_size",),
    ),
    Key(
        f"{_ZERO}.stage3_param_persistence_threshold",
        "int",
        100_000,
        Role.ACTS,
        "parameters with fewer elements are never partitioned",
        "the same (`persistence_threshold_numel`)",
        auto="100000",
        example=100_000,
        stage3=True,
        aliases=(f"{_ZERO}.param_persistence_threshold",),
    ),
    Key(
        f"{_ZERO}.stage3_max_live_parameters",
        "int",
        1_000_000_000,
        Role.ACTS,
        "gathered elements alive at a time",
        "the same (`max_live_numel`); left out, what the device budget holds",
        auto="what the device budget holds",
        example=1_000_000_000,
        stage3=True,
        aliases=(f"{_ZERO}.max_live_parameters",),
    ),
    Key(
        f"{_ZERO}.stage3_max_reuse_distance",
        "int",
        1_000_000_000,
        Role.ACTS,
        "keep what is used again within so many elements",
        "the same (`max_reuse_numel`); left out, while there is room",
        auto="while there is room",
        example=1_000_000_000,
        stage3=True,
        aliases=(f"{_ZERO}.max_reuse_distance",),
    ),
    no_op(
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
        False,
        "whether the engine saves whole 16-bit weights",
        "saving whole weights by the engine is not built yet: until then engine.module.state_dict() on "
        "all ranks, and torch.save on the first",
        stage3=True,
        aliases=(
            f"{_ZERO}.gather_16bit_weights_on_model_save",
            f"{_ZERO}.stage3_gather_fp16_weights_on_model_save",
        ),
    ),
    no_op(
        f"{_ZERO}.stage3_model_persistence_threshold",
        9_223_372_036_854_775_807,
        "upper bound of all elements that are never partitioned",
        "there is no such bound: lower stage3_param_persistence_threshold instead",
        aliases=(f"{_ZERO}.model_persistence_threshold",),
    ),
    no_op(
        f"{_ZERO}.stage3_module_granularity_threshold",
        0,
        "fetch small modules as a whole",
        "blocks are the units of fetching: name them with tiermem.shard(model, rt, wrap=...)",
        aliases=(f"{_ZERO}.module_granularity_threshold",),
    ),
    Key(
        f"{_ZERO}.leaf_module",
        "object",
        None,
        Role.ACTS,
        "modules that are fetched as a whole",
        "below",
        example={"classes": ["MyExperts"]},
        stage3=True,
    ),
    *(
        Key(
            f"{_ZERO}.leaf_module.{which}",
            "names",
            [],
            Role.ACTS,
            f"their {what}",
            "kept for the engine (`leaf_modules`); no class is taken without being named",
            no_auto="give a list of names",
            example=["MyExperts"],
            stage3=True,
        )
        for which, what in (
            ("classes", "classes, by name or with their module"),
            ("names", "names in the model"),
            ("name_suffixes", "names' ends"),
        )
    ),
)

_PLUS = (
    refused(
        f"{_ZERO}.zero_hpz_partition_size",
        1,
        "ZeRO++: ranks that hold a second copy of the parameters",
        _ZEROPP,
        fine=(0, 1),
    ),
    refused(f"{_ZERO}.zero_quantized_weights", False, "ZeRO++: send parameters in 8 bits", _ZEROPP),
    refused(
        f"{_ZERO}.zero_quantized_nontrainable_weights",
        False,
        "ZeRO++: keep frozen parameters in 8 bits",
        _ZEROPP,
    ),
    refused(f"{_ZERO}.zero_quantized_gradients", False, "ZeRO++: send gradients in 4 bits", _ZEROPP),
    refused(
        f"{_ZERO}.zeropp_loco_param",
        None,
        "ZeRO++: error feedback",
        _ZEROPP,
        kind="object",
        fields=("err_beta", "reset_T"),
        is_on=not_empty,
    ),
    refused(
        f"{_ZERO}.mics_shard_size",
        -1,
        "MiCS: ranks over which parameters are shared out",
        _MICS,
        fine=(-1, 0),
        low=-1,
    ),
    refused(f"{_ZERO}.mics_hierarchical_params_gather", False, "MiCS: gather in two levels", _MICS),
    refused(
        f"{_ZERO}.zenflow",
        None,
        "update important gradients at once, others later",
        "it changes the result and is not built; leave the block out",
        kind="object",
        is_on=not_empty,
    ),
)

_OTHERS = (
    refused(
        f"{_ZERO}.load_from_fp32_weights",
        True,
        "take masters from a checkpoint's fp32 copies",
        "masters are loaded as they were saved; write true or leave the key out",
    ),
    no_op(
        f"{_ZERO}.stage3_use_all_reduce_for_fetch_params",
        False,
        "fetch with all-reduce",
        _FLAT,
        aliases=(f"{_ZERO}.use_all_reduce_for_fetch_params",),
    ),
    no_op(
        f"{_ZERO}.stage3_allgather_sequential",
        False,
        "gather parameters one by one",
        _FLAT,
        aliases=(f"{_ZERO}.allgather_sequential",),
    ),
    no_op(
        f"{_ZERO}.stage3_partition_stream_chunk_size",
        0,
        "partition large parameters in chunks",
        "parameters go to their tier block by block",
        aliases=(f"{_ZERO}.partition_stream_chunk_size",),
    ),
    no_op(
        f"{_ZERO}.elastic_checkpoint",
        False,
        "save for other numbers of ranks",
        "states can always be loaded on another number of ranks",
    ),
    no_op(f"{_ZERO}.legacy_stage1", False, "the first stage 1", "there is one stage 1"),
    no_op(
        f"{_ZERO}.memory_efficient_linear",
        True,
        "linear layers that keep no weights for backward",
        "no layer keeps gathered weights for backward",
    ),
    no_op(
        f"{_ZERO}.override_module_apply",
        True,
        "replace Module.apply",
        "nothing of torch is replaced",
    ),
    no_op(
        f"{_ZERO}.pipeline_loading_checkpoint",
        False,
        "load pipeline checkpoints",
        "there is no pipeline engine",
    ),
    no_op(
        f"{_ZERO}.log_trace_cache_warnings",
        False,
        "log when the order of use changes",
        "rt.stats() counts what was not fetched in time",
    ),
    no_op(
        f"{_ZERO}.enable_sanity_checks",
        False,
        "internal checks",
        "`poison_released` in tiermem's own configuration is for debugging",
    ),
    no_op(
        f"{_ZERO}.save_muon_momentum_buffer_in_memory",
        False,
        "for the optimizer Muon",
        "there is no Muon",
    ),
)

ZERO_KEYS: tuple[Key, ...] = (
    *_STAGES,
    *_EXCHANGE,
    *OFFLOAD_PARAM,
    *OFFLOAD_OPTIMIZER,
    *_STAGE3,
    *_PLUS,
    *_OTHERS,
)
