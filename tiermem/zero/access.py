"""Looking at sharded parameters, masters and gradients whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from tiermem.errors import StateError
from tiermem.types import Field
from tiermem.zero.group import ParamGroup
from tiermem.zero.group_gradient import flatten_like
from tiermem.zero.masters import store_master
from tiermem.zero.param import ShardedParam
from tiermem.zero.placeholder import Placeholder
from tiermem.zero.states import collect


def find_handle(param: torch.Tensor) -> ShardedParam | None:
    """The sharded parameter behind what ``model.parameters()`` gives outside of forwards and
    `gathered` blocks; None for any other tensor."""
    if isinstance(param, Placeholder) and isinstance(param._handle, ShardedParam):
        return param._handle
    return None


def handle_of(param: torch.Tensor) -> ShardedParam:
    """The same. Raises `StateError` for any other tensor."""
    handle = find_handle(param)
    if handle is not None:
        return handle
    shape = f" of shape {tuple(param.shape)}" if isinstance(param, torch.Tensor) else ""
    raise StateError(
        f"a {type(param).__name__}{shape} is not a sharded parameter. Remedy: "
        f"take it from model.parameters() outside of the model's forward"
    )


@contextmanager
def gathered(params: Iterable[torch.Tensor] | torch.Tensor, *, modify: bool = False) -> Iterator[None]:
    """Inside the block the groups of ``params`` are unsharded: their modules' attributes are the
    real parameters, and ``.data`` of the given ones works.

    Ordinary in-place writes, and data that are replaced, are noticed by themselves; ``modify=True`` is
    for writes that torch does not count (through ``.data``, numpy or pointers): everything is then
    written back, and masters are rebuilt from the parameters. ``requires_grad`` and ``grad`` that are
    set inside count from the end of the block on; gradients that have left for their tier do not show
    inside, so the model's ``zero_grad()`` is for outside (the optimizer's works everywhere). Over
    several ranks all of them enter it alike, and write the same: each keeps its own shard of what it
    has written. Raises `BudgetError` if the groups do not fit device memory at once.
    """
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    groups: dict[ParamGroup, None] = {}
    for param in given:
        if isinstance(param, Placeholder):
            groups[handle_of(param).group] = None
    if not groups:
        yield
        return
    runtime = next(iter(groups)).runtime
    with runtime.forward.gathered(list(groups), modify=modify):
        yield


def full_param(param: torch.Tensor) -> torch.Tensor:
    """A copy of the parameter as it computes, whole. Over several ranks all of them call it."""
    handle = handle_of(param)
    with torch.no_grad():
        copy: torch.Tensor = handle.call(
            lambda real: real.detach().clone(), (handle.real,), {}, [handle]
        )
    return copy


def full_master(param: torch.Tensor) -> torch.Tensor:
    """A copy of the parameter's fp32 master (of the parameter itself where that is fp32), whole.
    Over several ranks all of them call it."""
    handle = handle_of(param)
    runtime = handle.group.runtime
    value = full_param(param)
    region = handle.region
    if region.master is None:
        return value.to(torch.float32)
    if region.master == Field.MASTER:
        with runtime.interrupts:
            return runtime.states.read(region, Field.MASTER, handle)
    stride = handle.spec.stride
    with runtime.interrupts:
        remainder = handle.part_of(runtime.states.read(region, Field.MASTER_LO, handle))
    master = torch.empty_strided(handle.spec.shape, stride, dtype=torch.float32)
    compute = handle.part_of(value).cpu()
    runtime.kernels.merge_master(
        flatten_like(compute, stride), flatten_like(remainder, stride), flatten_like(master, stride)
    )
    return handle.wrap(master)


def set_full_master(param: torch.Tensor, master: torch.Tensor) -> None:
    """Sets a 16-bit parameter so that its master is ``master`` (fp32), or an fp32 parameter to it."""
    handle = handle_of(param)
    if tuple(master.shape) != tuple(handle.shape):
        raise StateError(
            f"a master of shape {tuple(master.shape)} does not fit {handle.name!r} "
            f"{tuple(handle.shape)}"
        )
    if handle.group.unsettled:
        raise StateError(
            f"the master of {handle.name!r} cannot be set inside GatheredParameters, which decides at "
            f"its end what is kept. Remedy: set it outside of the block"
        )
    runtime = handle.group.runtime
    region = handle.region
    part = handle.part_of(master.detach()).to(device="cpu", dtype=torch.float32)
    flat = flatten_like(part, handle.spec.stride)
    if region.master is None:
        _overwrite(handle, flat)
        return
    compute = torch.empty(flat.numel(), dtype=handle.spec.dtype)
    state = torch.empty(flat.numel(), dtype=region.states[region.master].dtype)
    store_master(runtime.kernels, flat, compute, state)
    _overwrite(handle, compute)
    with runtime.interrupts:
        runtime.states.write(region, region.master, handle, state)


def _overwrite(handle: ShardedParam, flat: torch.Tensor) -> None:
    """Sets the parameter, as far as it is here, from ``flat``, in memory order."""
    values = flat.as_strided(handle.spec.shape, handle.spec.stride)
    with torch.no_grad():
        handle.call(lambda: handle.inner.copy_(values), (), {}, [handle])


def full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """A copy of the gradient accumulated so far that no ``step()`` has taken; None if there is
    none. Its dtype is the parameter's, or fp32 after a second micro-step. Where losses are scaled it
    is that of the scaled loss: divide by ``optimizer.loss_scale``. Over several ranks all of them call
    it, and get the mean over the ranks."""
    handle = handle_of(param)
    runtime, region = handle.group.runtime, handle.region
    with runtime.interrupts:
        runtime.reducer.flush()
        own = handle.group.gradient
        if own is None or handle.index not in own.present:
            return None
        runtime.gradients.bring_in(own)
        held = own.held(handle)
        flat = torch.empty(handle.spec.numel, dtype=own.dtype(region))
        flat[held.start : held.stop] = own.param_view(handle)
        if own.scale != 1.0:
            flat *= own.scale
        runtime.gradients.park(handle.group)
        if region.owned.numel < region.layout.numel:
            collect(handle, flat, "gradient")
    return handle.wrap(flat.as_strided(handle.spec.shape, handle.spec.stride))
