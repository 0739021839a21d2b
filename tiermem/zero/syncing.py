"""`no_sync`: backwards whose gradients are not reduced over the ranks yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from tiermem.errors import StateError
from tiermem.zero.param import ShardedParam
from tiermem.zero.placeholder import Placeholder
from tiermem.zero.runtime import Runtime


@contextmanager
def no_sync(of: nn.Module | Runtime) -> Iterator[None]:
    """Inside the block the backwards of ``of`` (a runtime, or a model sharded on one) exchange no
    gradients; the first backward after it, or else ``step()``, reduces what has accumulated.

    Works at every stage, for all models of the runtime; all ranks do it alike. It saves the exchange
    of a micro-step's gradients and takes host memory for a whole model's in fp32 on each rank (in the
    parameters' precision with ``gradient_accumulation_dtype: "param"``), which no budget plans for:
    `BudgetError` says how much is missing. A rank alone exchanges nothing, so nothing changes there.
    Raises `StateError` with ``update: 'backward'``.
    """
    runtimes = [of] if isinstance(of, Runtime) else _runtimes(of)
    with ExitStack() as stack:
        for runtime in runtimes:
            if runtime.updates.in_backward:
                raise StateError(
                    "no_sync() leaves gradients for a later backward, but update: 'backward' uses them "
                    "in the one they come from. Remedy: update: 'deferred'"
                )
            stack.enter_context(runtime.reducer.paused())
        yield


def _runtimes(model: nn.Module) -> list[Runtime]:
    found: dict[Runtime, None] = {}
    for param in model.parameters():
        if isinstance(param, Placeholder) and isinstance(param._handle, ShardedParam):
            found[param._handle.group.runtime] = None
    if not found:
        raise StateError(
            f"no parameter of this {type(model).__name__} is sharded. Remedy: tiermem.shard(model, "
            f"runtime) first; for a DistributedDataParallel its own no_sync()"
        )
    return list(found)
