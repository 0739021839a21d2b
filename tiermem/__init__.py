"""tiermem: train models that do not fit in memory.

Parameters, gradients and optimizer states live in tiers (device, host memory, NVMe) and are moved
asynchronously. Names are loaded when they are first used, so that ``tiermem.io`` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiermem import optim
    from tiermem.config import TierConfig
    from tiermem.engine.engine import Engine
    from tiermem.engine.initialize import add_config_arguments, init_distributed, initialize
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
_MODULES = frozenset({"optim", "io", "config", "errors", "kernels", "models"})

__all__ = [
    "Engine",
    "Runtime",
    "TierConfig",
    "add_config_arguments",
    "full_grad",
    "full_master",
    "full_param",
    "gathered",
    "init_distributed",
    "initialize",
    "no_sync",
    "optim",
    "set_full_master",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"tiermem.{name}")
    raise AttributeError(f"module 'tiermem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
