"""When updates happen: under the next forward (deferred), or inside backward.

[Note: update modes] *Deferred*: gradients are kept; ``step()`` freezes what an update uses, and the
gather scheduler applies a group's update before anybody sees its parameters. *Backward*: a group is
updated when its backward is done and no saved tensor of it is alive. A group that is still needed
then (another graph is alive) keeps its gradients and is updated by ``step()`` like a deferred one;
both modes run the same pipeline on the same frozen scalars and give the same bits. What a plain
loop cannot say in advance is refused before anything is updated: ``retain_graph``, a backward
inside backward (reentrant checkpointing), a second backward before ``step()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tiermem.errors import StateError
from tiermem.zero import compat
from tiermem.zero.group import ParamGroup
from tiermem.zero.param import ShardedParam
from tiermem.zero.rule import UpdateRule
from tiermem.zero.update import PendingUpdate

if TYPE_CHECKING:
    from tiermem.zero.group_gradient import GroupGradient
    from tiermem.zero.runtime import Runtime


class OptimizerLink(Protocol):
    """What the runtime needs of an optimizer."""

    @property
    def rule(self) -> UpdateRule: ...

    def freeze(self, group: ParamGroup, gradient: GroupGradient) -> PendingUpdate:
        """Counts one step for the parameters with gradients; everything that the update uses."""


@dataclass(slots=True)
class StepFigures:
    """What optimizers last said of their steps."""

    grad_norm: float | None = None  # without the loss scale, before clipping
    clipped_norm: float | None = None
    loss_scale: float | None = None
    skipped_steps: int = 0


class UpdateController:
    """See [Note: update modes]. Training thread (and autograd's)."""

    def __init__(self, runtime: Runtime, *, in_backward: bool) -> None:
        self._runtime = runtime
        self.in_backward = in_backward
        self.owners: dict[ParamGroup, OptimizerLink] = {}
        self.figures = StepFigures()
        self.attach: Callable[..., None] = _no_attach  # set by attach.py, which lies above
        self.updated: dict[ParamGroup, OptimizerLink] = {}  # since its last step(), inside backward

    def before_gradient(self, param: ShardedParam, *, nested: bool) -> None:
        """Refuses what cannot be right when updating inside backward."""
        if not self.in_backward or param.group not in self.owners:
            return
        if nested:
            raise _refused("a backward inside backward (reentrant activation checkpointing)")
        if param.group in self.updated:
            raise _refused(f"a second backward before step() (again a gradient of {param.name!r})")
        if compat.backward_retains_graph():
            raise _refused("backward(retain_graph=True)")

    def after_backward(self, group: ParamGroup) -> None:
        """The running backward has accumulated all it will into ``group``."""
        if group.sharing.alone:
            self.complete(group)
        else:
            self._runtime.reducer.group_done(group)

    def complete(self, group: ParamGroup) -> None:
        """The group's gradients of the running backward are there, reduced over all ranks."""
        owner = self.owners.get(group)
        if not self.in_backward or owner is None or group.handles or group.gradient is None:
            self._runtime.gradients.park(group)
            return
        self.start(group, owner)
        self.updated[group] = owner

    def start(self, group: ParamGroup, owner: OptimizerLink) -> None:
        """Freezes the update of ``group`` and starts it as soon as there is room."""
        self.freeze(group, owner)
        self._runtime.gather.update_now(group)

    def freeze(self, group: ParamGroup, owner: OptimizerLink) -> None:
        """From here on the group's gradients belong to its pending update."""
        if group.unsettled:
            raise StateError(
                f"{group.name!r} cannot be updated inside GatheredParameters, where nobody knows yet "
                f"which of its writes are kept. Remedy: step() after the block, and with update: "
                f"'backward' also backward()"
            )
        if group.pending is not None or group.owed:
            self._runtime.gather.apply_pending([group])
        self._runtime.gather.shares.honour(group)
        self._runtime.gather.settle(group)
        gradient = group.gradient
        assert gradient is not None
        group.pending = owner.freeze(group, gradient)
        group.gradient = None
        group.version += 1
        group.updates += 1
        group.owed = True
        group.whole = group.sharing.keeps_whole

    def make_trainable(self, param: ShardedParam) -> None:
        """A parameter that was frozen when its model was sharded is to have gradients: its region
        gets gradients and states. Not between backward and step."""
        group = param.group
        region = param.region
        if group.gradient is not None:
            raise StateError(
                f"{param.name!r} cannot be unfrozen while {group.name!r} has gradients. Remedy: "
                f"step() or zero_grad() first"
            )
        self._runtime.gather.apply_pending([group])
        region.trainable = True
        self._runtime.gradients.forget_buffers(group)
        owner = self.owners.pop(group, None)
        if owner is None:
            return
        try:
            self.attach(self._runtime, owner, owner.rule, [group])
        except BaseException:
            region.trainable = False
            self._runtime.gradients.forget_buffers(group)
            self.attach(self._runtime, owner, owner.rule, [group])
            raise

    def fetch_failed(self, error: BaseException) -> None:
        """A fetch failed. Between the updates of one backward that leaves groups of two steps."""
        if self.updated and self._runtime.backward.running:
            self._runtime.mark_torn(error)

    def stepped(self, owner: OptimizerLink) -> None:
        """``owner.step()`` has taken what was updated for it."""
        self.updated = {group: other for group, other in self.updated.items() if other is not owner}

    def check_discard(self, owner: OptimizerLink) -> None:
        """``owner.zero_grad()`` is about to forget gradients."""
        if owner in self.updated.values():
            raise StateError(
                "zero_grad() without step() cannot take back the updates that update: 'backward' has "
                "made. Remedy: step() completes them with the gradients that have accumulated (after "
                "a backward that failed: not all of them; to undo, start from a checkpoint), or "
                "update: 'deferred', which is right for any loop (such as one with two optimizers "
                "over one graph)"
            )


def _no_attach(*_: object) -> None:
    raise StateError("no optimizer was attached")


def _refused(what: str) -> StateError:
    return StateError(
        f"{what} is not possible with update: 'backward', which updates each group while backward "
        f"runs. Remedy: update: 'deferred' (the default), which is right for any loop"
    )
