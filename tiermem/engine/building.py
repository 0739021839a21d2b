"""The optimizer of an engine: the configuration's, or what the user gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from tiermem.config import DeepSpeedConfig
from tiermem.engine.parameters import Replacement
from tiermem.errors import ConfigError
from tiermem.optim import SGD, Adam, Adam8bit, AdamW, AdamW8bit, Tiered, TieredOptimizer, convert
from tiermem.optim.convert import states_for
from tiermem.zero.rule import StatePlan, adamw_states
from tiermem.zero.runtime import Runtime

Given = Optimizer | Callable[[list[Any]], Optimizer] | None

_NATIVE: Mapping[str, type[AdamW] | type[SGD]] = {
    "AdamW": AdamW,
    "Adam": Adam,
    "AdamW8bit": AdamW8bit,
    "Adam8bit": Adam8bit,
    "SGD": SGD,
}


def plan_states(given: Given, config: DeepSpeedConfig) -> StatePlan:
    """What the optimizer that comes will keep. Of a function that makes one nothing is known: as much
    as AdamW."""
    if isinstance(given, TieredOptimizer):
        raise ConfigError(
            f"the optimizer is a tiermem.optim.{type(given).__name__} already, over a model that is "
            f"sharded. Remedy: initialize(optimizer=lambda params: "
            f"tiermem.optim.{type(given).__name__}(params, ...))"
        )
    if isinstance(given, Optimizer):
        return states_for(given)
    if given is not None or config.optimizer is None:
        return adamw_states
    block = config.optimizer
    if block.type in _NATIVE:
        return _NATIVE[block.type].states_of(**block.params)
    return Tiered.states_of(getattr(torch.optim, block.type), **block.params)


def make_optimizer(
    given: Given,
    config: DeepSpeedConfig,
    parameters: list[Any],
    replacement: Replacement,
    runtime: Runtime,
) -> TieredOptimizer | None:
    """The optimizer over ``parameters`` (or those that ``given`` was made for); None if nothing says
    which, or there is nothing to train."""
    if isinstance(given, Optimizer):
        return convert(given, replacement.of, runtime)
    if not parameters:
        return None
    if given is not None:
        made = given(parameters)
        if not isinstance(made, TieredOptimizer):
            raise ConfigError(
                f"optimizer= made a {type(made).__module__}.{type(made).__name__}, which cannot update "
                f"sharded parameters. Remedy: a function that makes one of tiermem.optim, such as "
                f"tiermem.optim.Tiered({type(made).__name__}, params, ...); or an optimizer of torch "
                f"itself, made before initialize"
            )
        return made
    if config.optimizer is None:
        return None
    block = config.optimizer
    if block.type in _NATIVE:
        return _NATIVE[block.type](parameters, runtime=runtime, **block.params)
    wrapped = getattr(torch.optim, block.type)  # an element-wise one: the configuration knows them
    return Tiered(wrapped, parameters, runtime=runtime, **block.params)
