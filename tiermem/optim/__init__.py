"""Optimizers over tiers."""

from tiermem.optim.adamw import Adam, AdamW
from tiermem.optim.adamw_8bit import Adam8bit, AdamW8bit
from tiermem.optim.base import TieredOptimizer
from tiermem.optim.convert import convert
from tiermem.optim.elementwise import Tiered
from tiermem.optim.sgd import SGD
from tiermem.optim.state import LazyState

__all__ = [
    "SGD",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "LazyState",
    "Tiered",
    "TieredOptimizer",
    "convert",
]
