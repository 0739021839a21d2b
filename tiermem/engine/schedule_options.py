"""What schedules are made of: numbers by parameter group, checked, and the shape of a warm-up."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal

from torch.optim import Optimizer

from tiermem.errors import ConfigError

logger = logging.getLogger(__name__)

PerGroup = float | Sequence[float]
"""One number for all parameter groups of an optimizer, or one for each."""

Warmup = Literal["log", "linear"]


def per_group(optimizer: Optimizer, name: str, value: PerGroup) -> list[float]:
    """``value`` for each of the optimizer's groups. Raises `ConfigError`."""
    count = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ConfigError(
            f"{name} has {len(value)} values, the optimizer has {count} parameter groups; give one "
            f"number, or one for each"
        )
    return [float(each) for each in value]


def check_positive(name: str, value: int) -> int:
    """``value``. Raises `ConfigError` if it is no whole number above 0."""
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number above 0")
    return int(value)


def check_warmup(num_steps: int, warmup_type: str) -> int:
    """The number of warm-up iterations in force. Raises `ConfigError`."""
    if warmup_type not in ("log", "linear"):
        raise ConfigError(f"warmup_type is {warmup_type!r}; it is 'log' or 'linear'")
    return max(2, check_positive("warmup_num_steps", num_steps))


def check_total(total_num_steps: int, warmup_num_steps: int) -> int:
    """``total_num_steps``. Raises `ConfigError`; warns if training ends within the warm-up."""
    total = check_positive("total_num_steps", total_num_steps)
    if total < warmup_num_steps:
        logger.warning(
            "total_num_steps %d is below warmup_num_steps %d: training ends before the rate is warm",
            total,
            warmup_num_steps,
        )
    return total


def warmed(iteration: int, num_steps: int, warmup_type: Warmup) -> float:
    """Which share of the way ``iteration`` of the warm-up has come, from 0 to 1; see `WarmupLR`."""
    if warmup_type == "log":
        return math.log(iteration + 1) / math.log(num_steps)
    return iteration / num_steps
