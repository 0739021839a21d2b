"""Optimizers over tiers."""

from tiermem.optim.adamw import AdamW
from tiermem.optim.state import LazyState

__all__ = ["AdamW", "LazyState"]
