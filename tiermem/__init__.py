"""tiermem: train models that do not fit in memory.

Parameters, gradients and optimizer states live in tiers (device, host memory, NVMe) and are moved
asynchronously. Names are loaded when they are first used, so that ``tiermem.io`` needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiermem import optim, zero
    from tiermem.config import TierConfig
    from tiermem.engine.engine import Engine
    from tiermem.engine.initialize import add_config_arguments, init_distributed, initialize
    from tiermem.zero import (
        GatheredParameters,
        Init,
        estimate_zero2_model_states_mem_needs,
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
        get_z3_leaf_modules,
        local_range,
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )
    from tiermem.zero.access import full_grad, full_master, full_param, gathered, set_full_master
    from tiermem.zero.runtime import Runtime
    from tiermem.zero.shard import shard
    from tiermem.zero.syncing import no_sync

_HOMES = {
    "Engine": "tiermem.engine.engine",
    "Runtime": "tiermem.zero.runtime",
    "TierConfig": "tiermem.config",
    "add_config_arguments": "tiermem.engine.initialize",
    "full_grad": "tiermem.zero.access",
    "full_master": "tiermem.zero.access",
    "full_param": "tiermem.zero.access",
    "gathered": "tiermem.zero.access",
    "init_distributed": "tiermem.engine.initialize",
    "initialize": "tiermem.engine.initialize",
    "no_sync": "tiermem.zero.syncing",
    "set_full_master": "tiermem.zero.access",
    "shard": "tiermem.zero.shard",
}
_MODULES = frozenset({"optim", "io", "config", "errors", "kernels", "models", "zero"})

__all__ = [
    "Engine",
    "GatheredParameters",
    "Init",
    "Runtime",
    "TierConfig",
    "add_config_arguments",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "full_grad",
    "full_master",
    "full_param",
    "gathered",
    "get_z3_leaf_modules",
    "init_distributed",
    "initialize",
    "local_range",
    "no_sync",
    "optim",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_full_master",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "shard",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tiermem.{name}")
    if name in __all__:  # what has no home here is one of the names of tiermem.zero
        return getattr(importlib.import_module(_HOMES.get(name, "tiermem.zero")), name)
    if name == "__version__":
        return importlib.metadata.version("tiermem")
    raise AttributeError(
        f"module 'tiermem' has no attribute {name!r}; of DeepSpeed's names those of its engine, "
        f"deepspeed.zero and deepspeed.utils are tiermem's own: {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
