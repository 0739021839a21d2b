"""Optimizers over tiers."""

from tiermem.optim.adamw import Adam, AdamW
from tiermem.optim.base import TieredOptimizer
from tiermem.optim.convert import convert
from tiermem.optim.elementwise import Tiered
from tiermem.optim.sgd import SGD
from tiermem.optim.state import LazyState

__all__ = ["SGD", "Adam", "AdamW", "LazyState", "Tiered", "TieredOptimizer", "convert"]
