"""DeepSpeed's ``safe_get_`` and ``safe_set_`` functions: masters, states and gradients of a parameter.

Parameters are those that ``model.parameters()`` gives, outside of forwards and `tiermem.gathered`
blocks. For any other tensor getters return None (`safe_get_full_grad`: its ``grad``) and setters raise
`StateError`. Values are fp32 copies, in memory of the host. Over several ranks all of them call each
function alike, the local ones too, since ranks agree on what lies in device memory.

[Note: local parts] What a rank owns of a parameter is one run of its elements, numbered in the order in
which they lie in memory (for contiguous parameters that of ``flatten()``): `local_range`. Parameters of
one unit lie one behind the other in a buffer that is cut into equal parts, so a rank may own all, some
or nothing of one of them; then its part is an empty tensor. At stages 1 to 3 it is what the rank
updates; at stage 0, and alone, it is everything. Of a `DTensor` it is a run of this rank's own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch

from tiermem.errors import StateError
from tiermem.zero.access import find_handle, full_grad, full_master, handle_of, set_full_master
from tiermem.zero.group_gradient import flatten_like
from tiermem.zero.param import ShardedParam
from tiermem.zero.rule import UpdateRule
from tiermem.zero.state_views import StateView
from tiermem.zero.states import collect


class _Optimizer(Protocol):
    """What is needed here of a group's optimizer."""

    @property
    def rule(self) -> UpdateRule: ...

    def state_comes(self, param: ShardedParam) -> None: ...

    def gradients_come(self) -> None: ...

    @property
    def state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]: ...

    @property
    def loss_scale(self) -> float: ...


# ---- whole


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The parameter's fp32 master, whole; of an fp32 parameter itself."""
    return None if find_handle(param) is None else full_master(param)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the parameter's master, and the parameter with it, to ``value`` of its shape."""
    _check_shape(handle_of(param), value, "master")
    set_full_master(param, value)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """The optimizer's state of the parameter, whole: ``exp_avg``, ``exp_avg_sq`` or what else it keeps;
    zeros before its first step. None without an optimizer, and for frozen parameters. Raises
    `StateError` for another key."""
    handle = find_handle(param)
    optimizer = None if handle is None else _optimizer_of(handle)
    if handle is None or optimizer is None or not handle.region.trainable:
        return None
    state = optimizer.state.get(param, {})
    if optim_state_key in state:
        return torch.as_tensor(state[optim_state_key]).to(torch.float32)
    view, runtime = _find_view(handle, optim_state_key), handle.group.runtime
    with runtime.interrupts:
        runtime.check_usable()
        runtime.gather.apply_pending([handle.group])
        return view.read(runtime, handle.region, handle).to(torch.float32)


def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Sets the optimizer's state of the parameter, of its shape. Raises `StateError` for a key that
    `safe_get_full_optimizer_state` does not know."""
    handle = handle_of(param)
    _check_shape(handle, value, optim_state_key)
    _write_state(handle, optim_state_key, value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient accumulated so far, whole: the mean over the ranks, clipped if that was asked for,
    and of the loss as it is *without* its scale. None if there is none (with ``update: 'backward'``
    there is none after backward)."""
    handle = find_handle(param)
    if handle is None:
        return param.grad
    gradient = full_grad(param)
    return None if gradient is None else gradient.to(torch.float32) / _loss_scale(handle)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Makes ``value``, of the parameter's shape, the gradient that the next ``step()`` uses (and that
    further backwards add to). It is that of the loss without its scale; it is kept in the precision in
    which gradients are accumulated. Norms are then those of the new gradients. Raises `StateError` for
    frozen parameters, and with ``update: 'backward'``, which has used the gradients by then."""
    handle = handle_of(param)
    _check_shape(handle, value, "gradient")
    _replace_gradient(handle, handle.part_of(value.detach()))


# ---- this rank's part


def local_range(param: torch.Tensor) -> range:
    """The elements of the parameter that this rank owns; see [Note: local parts]."""
    handle = handle_of(param)
    segment = handle.segment
    mine = handle.region.owned.meet(segment.start, segment.stop)
    return range(mine.start - segment.start, mine.start - segment.start + mine.numel)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_fp32_param`, 1-D; see [Note: local parts]."""
    return _local_part(param, safe_get_full_fp32_param(param))


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's part of the master, and of the parameter, to ``value`` (1-D); every rank gives
    its own. See [Note: local parts]."""
    handle = handle_of(param)
    flat = _with_local_part(param, value)
    region, runtime = handle.region, handle.group.runtime
    if region.owned.numel < region.layout.numel:
        with runtime.interrupts:
            runtime.check_usable()
            runtime.gather.apply_pending([handle.group])
            collect(handle, flat, "parts of a new master")
    set_full_master(param, handle.wrap(flat.as_strided(handle.spec.shape, handle.spec.stride)))


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_optimizer_state`, 1-D; see [Note: local parts]."""
    return _local_part(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Sets this rank's part of a state to ``value`` (1-D); see [Note: local parts]."""
    handle, flat = handle_of(param), _with_local_part(param, value)
    part = flat.as_strided(handle.spec.shape, handle.spec.stride)
    _write_state(handle, optim_state_key, handle.wrap(part))


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of `safe_get_full_grad`, 1-D; see [Note: local parts]."""
    return _local_part(param, safe_get_full_grad(param))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's part of the gradient to ``value`` (1-D), as `safe_set_full_grad` does; every
    rank gives its own. See [Note: local parts]."""
    handle = handle_of(param)
    flat = _with_local_part(param, value)
    _replace_gradient(handle, flat.as_strided(handle.spec.shape, handle.spec.stride))


# ---- how


def _optimizer_of(handle: ShardedParam) -> _Optimizer | None:
    return cast("_Optimizer | None", handle.group.runtime.updates.owners.get(handle.group))


def _loss_scale(handle: ShardedParam) -> float:
    optimizer = _optimizer_of(handle)
    return 1.0 if optimizer is None else optimizer.loss_scale


def _find_view(handle: ShardedParam, key: str) -> StateView:
    """The state that ``key`` names. Raises `StateError`."""
    optimizer = _optimizer_of(handle)
    views = optimizer.rule.views if optimizer is not None and handle.region.trainable else ()
    found = next((view for view in views if view.key == key), None)
    if found is None:
        known = ", ".join(view.key for view in views) or "none (no optimizer, or a frozen parameter)"
        raise StateError(f"{handle.name!r} has no state {key!r}; it has: {known}")
    return found


def _write_state(handle: ShardedParam, key: str, value: torch.Tensor) -> None:
    """Sets a state from ``value``, of the parameter's shape, as far as this rank owns it."""
    view, runtime = _find_view(handle, key), handle.group.runtime
    optimizer = _optimizer_of(handle)
    with runtime.interrupts:
        runtime.check_usable()
        runtime.gather.apply_pending([handle.group])
        if optimizer is not None:
            optimizer.state_comes(handle)
        view.write(runtime, handle.region, handle, value)


def _replace_gradient(handle: ShardedParam, part: torch.Tensor) -> None:
    """Makes ``part``, which has the shape of this rank's part of the parameter, its gradient."""
    runtime = handle.group.runtime
    if runtime.updates.in_backward:
        raise StateError(
            f"the gradient of {handle.name!r} cannot be set: update: 'backward' has used it in "
            f"backward. Remedy: update: 'deferred'"
        )
    if not (handle.real.requires_grad and handle.region.trainable):
        raise StateError(f"{handle.name!r} is frozen: it has no gradient that could be set")
    with runtime.interrupts:
        runtime.check_usable()
        runtime.reducer.flush()  # what is not reduced yet must not be added to it later
        scaled = part.to(torch.float32) * _loss_scale(handle)
        optimizer = _optimizer_of(handle)
        if optimizer is not None:
            optimizer.gradients_come()
        runtime.gradients.replace(handle, handle.wrap(scaled))


def _local_part(param: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor | None:
    handle = find_handle(param)
    if handle is None or whole is None:
        return None
    mine = local_range(param)
    flat = flatten_like(handle.part_of(whole), handle.spec.stride)
    return flat[mine.start : mine.stop].clone()


def _with_local_part(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """All elements of the parameter in memory order, those of this rank from ``value``."""
    handle, mine = handle_of(param), local_range(param)
    if value.numel() != len(mine):
        raise StateError(
            f"{value.numel()} elements do not fit this rank's part of {handle.name!r}, which has "
            f"{len(mine)} ({mine.start} to {mine.stop}); see local_range"
        )
    flat = torch.zeros(handle.spec.numel, dtype=torch.float32)
    flat[mine.start : mine.stop] = value.detach().to(device="cpu", dtype=torch.float32).flatten()
    return flat


def _check_shape(handle: ShardedParam, value: torch.Tensor, what: str) -> None:
    if not isinstance(value, torch.Tensor) or value.is_complex():
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise StateError(f"a {what} for {handle.name!r} is a tensor of real numbers, not {kind}")
    if tuple(value.shape) != tuple(handle.shape):
        raise StateError(
            f"a {what} of shape {tuple(value.shape)} does not fit {handle.name!r} {tuple(handle.shape)}"
        )
