"""An optimizer of torch's, or somebody's, as one over tiers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiermem.errors import ConfigError
from tiermem.optim.adamw import Adam, AdamW
from tiermem.optim.base import TieredOptimizer
from tiermem.optim.elementwise import Tiered
from tiermem.optim.sgd import SGD
from tiermem.zero import compat
from tiermem.zero.rule import StatePlan
from tiermem.zero.runtime import Runtime


def convert(
    optimizer: Optimizer, replace: Callable[[torch.Tensor], torch.Tensor], runtime: Runtime
) -> TieredOptimizer:
    """The tiered optimizer that does what ``optimizer`` did, with its parameter groups, options, state
    and step hooks; ``replace`` gives the sharded parameter of each of its own.

    The parameter groups are the same objects from then on, so that a scheduler made for ``optimizer``
    acts; ``optimizer`` itself is not to be used any more. Raises `ConfigError` for one that couples
    elements, or of which nobody can tell how it was made.
    """
    groups = [{**g, "params": [replace(p) for p in g["params"]]} for g in optimizer.param_groups]
    saved = optimizer.state_dict() if optimizer.state else None
    kind = _native(optimizer)
    if kind is None:
        result: TieredOptimizer = Tiered(
            type(optimizer), groups, runtime=runtime, **_arguments(optimizer)
        )
    else:
        accepted = inspect.signature(kind).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        result = kind(groups, runtime=runtime, **options)
    if saved is not None:
        result.load_state_dict(saved)
    optimizer.state.clear()
    for ours, theirs in zip(result.param_groups, optimizer.param_groups, strict=True):
        theirs.clear()
        theirs.update(ours)
    result.param_groups[:] = optimizer.param_groups
    for before in compat.step_hooks(optimizer, "before"):
        result.register_step_pre_hook(before)
    for after in compat.step_hooks(optimizer, "after"):
        result.register_step_post_hook(after)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
    return result


def states_for(optimizer: Optimizer) -> StatePlan:
    """What the converted optimizer will keep, for ``tiermem.shard(..., states=...)``. Raises as
    `convert`."""
    kind, groups = _native(optimizer), optimizer.param_groups
    if kind is None:
        return Tiered.states_of(type(optimizer), groups, **_arguments(optimizer))
    options = dict(optimizer.defaults)
    if kind is SGD:
        options["momentum"] = max(group["momentum"] for group in (options, *groups))
    plan: StatePlan = kind.states_of(**options)
    return plan


def _native(optimizer: Optimizer) -> Any:
    """The class with kernels of its own for exactly what ``optimizer`` does, if there is one. Raises
    `ConfigError` if its class does not say what it does."""
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"this {type(optimizer).__name__} has a step() of its own, put on it after it was made, "
            f"which nothing would call. Remedy: a class with that step()"
        )
    every: list[Mapping[str, Any]] = [optimizer.defaults, *optimizer.param_groups]
    if any(group.get("amsgrad") for group in every):
        return None
    if type(optimizer) is torch.optim.SGD:
        return SGD
    if type(optimizer) is torch.optim.AdamW:
        return AdamW
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in every}
    if type(optimizer) is torch.optim.Adam and len(decoupled) == 1:
        return AdamW if decoupled.pop() else Adam
    return None


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """How another one like ``optimizer`` is made. Raises `ConfigError` if it does not say."""
    kind = type(optimizer)
    parameters = list(inspect.signature(kind).parameters.values())[1:]  # the first are its parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(optimizer.defaults)
    unknown = [p.name for p in parameters if p.name not in optimizer.defaults]
    if unknown:
        name = kind.__name__
        raise ConfigError(
            f"{name} was made with {', '.join(unknown)}, which it does not keep among its defaults, so "
            f"that nobody can tell the value. Remedy: initialize(optimizer=lambda params: "
            f"tiermem.optim.Tiered({name}, params, {unknown[0]}=..., ...))"
        )
    return {p.name: optimizer.defaults[p.name] for p in parameters}
