"""Optimizers over tiers."""

from tiermem.optim.adamw import AdamW
from tiermem.optim.base import TieredOptimizer
from tiermem.optim.elementwise import Tiered
from tiermem.optim.state import LazyState

__all__ = ["AdamW", "LazyState", "Tiered", "TieredOptimizer"]
