"""What a user can set, in tiermem's own vocabulary and in DeepSpeed's."""

from tiermem.config.batch import BatchSizes
from tiermem.config.deepspeed import DeepSpeedConfig, LeafModules, read_deepspeed
from tiermem.config.deepspeed_named import NamedBlock
from tiermem.config.deepspeed_tier import Effective
from tiermem.config.load import load_config
from tiermem.config.text import parse_lenient, read_json
from tiermem.config.tier import (
    PLACEMENTS,
    IOConfig,
    LossScaleConfig,
    Placement,
    TierConfig,
    Update,
)
from tiermem.config.vocabulary import is_deepspeed

__all__ = [
    "PLACEMENTS",
    "BatchSizes",
    "DeepSpeedConfig",
    "Effective",
    "IOConfig",
    "LeafModules",
    "LossScaleConfig",
    "NamedBlock",
    "Placement",
    "TierConfig",
    "Update",
    "is_deepspeed",
    "load_config",
    "parse_lenient",
    "read_deepspeed",
    "read_json",
]
