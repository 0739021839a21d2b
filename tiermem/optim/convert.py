"""An optimizer of torch's, or somebody's, as one over tiers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.optim.adamw import Adam, AdamW
from tiermem.optim.base import TieredOptimizer
from tiermem.optim.elementwise import Tiered
from tiermem.optim.sgd import SGD
from tiermem.zero.rule import StatePlan
from tiermem.zero.runtime import Runtime


def convert(
    optimizer: Optimizer, replace: Callable[[torch.Tensor], torch.Tensor], runtime: Runtime
) -> TieredOptimizer:
    """The tiered optimizer that does what ``optimizer`` did, with its parameter groups, options and
    state; ``replace`` gives the sharded parameter of each of its own.

    The parameter groups are the same objects from then on, so that a scheduler made for ``optimizer``
    acts; ``optimizer`` itself is not to be used any more. Raises `ConfigError` for a class that couples
    elements.
    """
    groups = [{**g, "params": [replace(p) for p in g["params"]]} for g in optimizer.param_groups]
    saved = optimizer.state_dict() if optimizer.state else None
    make = _maker(optimizer)
    result = make(groups, runtime=runtime)
    if saved is not None:
        result.load_state_dict(saved)
    optimizer.state.clear()
    for ours, theirs in zip(result.param_groups, optimizer.param_groups, strict=True):
        theirs.clear()
        theirs.update(ours)
    result.param_groups[:] = optimizer.param_groups
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
    return result


def states_for(optimizer: Optimizer) -> StatePlan:
    """What the converted optimizer will keep, for ``tiermem.shard(..., states=...)``."""
    kind = _native(optimizer)
    if kind is not None:
        plan: StatePlan = kind.states_of(**optimizer.defaults)
        return plan
    return Tiered.states_of(type(optimizer), **_arguments(optimizer))


def _maker(optimizer: Optimizer) -> Callable[..., TieredOptimizer]:
    kind = _native(optimizer)
    if kind is None:
        wrapped, arguments = type(optimizer), _arguments(optimizer)
        return lambda groups, runtime: Tiered(wrapped, groups, runtime=runtime, **arguments)
    accepted = inspect.signature(kind).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return lambda groups, runtime: kind(groups, runtime=runtime, **options)


def _native(optimizer: Optimizer) -> Any:
    """The class with kernels of its own for exactly what ``optimizer`` does, if there is one."""
    if any(group.get("amsgrad") for group in (optimizer.defaults, *optimizer.param_groups)):
        return None
    if type(optimizer) is torch.optim.SGD:
        return SGD
    if type(optimizer) is torch.optim.AdamW:
        return AdamW
    if type(optimizer) is torch.optim.Adam:
        return AdamW if optimizer.defaults.get("decoupled_weight_decay") else Adam
    return None


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """What of the optimizer's options its constructor takes."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in accepted}
