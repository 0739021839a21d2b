"""The ZeRO machinery: sharding, gathering, gradients, updates.

The names here are those that people know from DeepSpeed's ``zero`` and ``utils``; they are loaded when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiermem.engine.estimates import (
        estimate_zero2_model_states_mem_needs,
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from tiermem.zero.construction import Init
    from tiermem.zero.gathered_parameters import GatheredParameters
    from tiermem.zero.leaf_modules import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )
    from tiermem.zero.safe_access import (
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
    )

__all__ = [
    "GatheredParameters",
    "Init",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_z3_leaf_modules",
    "local_range",
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
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def _home(name: str) -> str:
    """The module that defines one of the names."""
    if name.startswith("estimate_"):
        return "tiermem.engine.estimates"
    if "z3_leaf" in name:
        return "tiermem.zero.leaf_modules"
    others = {"GatheredParameters": "gathered_parameters", "Init": "construction"}
    return f"tiermem.zero.{others.get(name, 'safe_access')}"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_home(name)), name)
    raise AttributeError(f"module 'tiermem.zero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
