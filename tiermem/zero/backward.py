"""What happens in a backward: saved weights come back, gradients leave, groups are given up.

[Note: saved tensors] Tensors that autograd saves and that lie in a lease are replaced by a
`SavedHandle` (group, offset, size, stride). Unpacking gathers the group again. In backward a group
is done when no handle of it is alive and its expected gradients have accumulated; what was unpacked
keeps the lease's storage alive by itself, so giving a group up early is never wrong, only slower.
A handle remembers the version of the values: weights changed between forward and backward raise, as
torch's own version counters do.

[Note: stale backward] End-of-backward callbacks do not run when backward raises. State is keyed by
the outermost graph task and the Python frame that runs it; when that frame has gone, or a new
forward begins, what is left over is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from tiermem.errors import StateError
from tiermem.zero import compat
from tiermem.zero.group import ParamGroup
from tiermem.zero.interrupts import uninterrupted
from tiermem.zero.param import ShardedParam
from tiermem.zero.split import Split

if TYPE_CHECKING:
    from tiermem.zero.runtime import Runtime

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class SavedHandle:
    """A saved tensor that lies in a group's buffer; see [Note: saved tensors]."""

    __slots__ = ("_alive", "dtype", "group", "offset", "shape", "split", "stride", "version")

    def __init__(self, group: ParamGroup, tensor: torch.Tensor) -> None:
        part = compat.local_tensor(tensor)
        self.group = group
        self.split = Split.of(tensor)
        self.dtype = part.dtype
        self.offset = part.storage_offset()
        self.shape = part.shape
        self.stride = part.stride()
        group.note_writes()
        self.version = group.version
        self._alive = group.handle_token


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A tensor packed by hooks that were active before ours."""

    value: Any


class Packer:
    """One pair of saved-tensor hooks, chained to the pair that was active outside."""

    __slots__ = ("_backward", "_outer")

    def __init__(self, backward: BackwardTracker, outer: Hooks | None) -> None:
        self._backward = backward
        self._outer = outer

    def pack(self, tensor: torch.Tensor) -> Any:
        group = self._backward.group_of(tensor)
        if group is not None:
            return SavedHandle(group, tensor)
        return tensor if self._outer is None else _Foreign(self._outer[0](tensor))

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedHandle):
            return self._backward.restore(packed)
        if isinstance(packed, _Foreign):
            assert self._outer is not None
            return self._outer[1](packed.value)
        return packed  # type: ignore[no-any-return]


class BackwardTracker:
    """See the notes above. Runs on whatever thread autograd runs hooks on, one at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tasks: set[int] = set()
        self._outermost = -1
        self._frame: FrameType | None = None
        self._live: dict[ParamGroup, None] = {}  # least recently used first
        self._accumulated: dict[ParamGroup, set[int]] = {}
        self.checks: list[Callable[[], None]] = []  # at the end of each; they raise

    def packer(self, outer: Hooks | None) -> Packer:
        return Packer(self, outer)

    def group_of(self, tensor: torch.Tensor) -> ParamGroup | None:
        """The group in whose lease ``tensor`` lies."""
        try:
            address = compat.local_tensor(tensor).untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # no storage: wrapper, sparse, fake tensors
            return None
        return self._runtime.gather.by_address.get(address)

    # ---- during a backward

    def touch(self, group: ParamGroup) -> None:
        """``group`` is used by the running backward."""
        self._enter()
        self._live.pop(group, None)
        self._live[group] = None

    def pins(self, group: ParamGroup) -> bool:
        return group in self._live

    @property
    def running(self) -> bool:
        return bool(self._tasks)

    def least_recently_used(self) -> list[ParamGroup]:
        """Groups that could be given up for another, oldest use first."""
        return [g for g in self._live if g.lease is not None and not (g.persistent or g.anchored)]

    @uninterrupted
    def restore(self, handle: SavedHandle) -> torch.Tensor:
        """The saved tensor, from a lease."""
        group = handle.group
        self._runtime.check_usable()
        if group.lease is not None:
            group.note_writes()
        if handle.version != group.version:
            raise StateError(
                f"parameters of {group.name!r} that backward needs were modified after the forward "
                f"that saved them (by an optimizer step or in place), so its gradients would be "
                f"wrong. Remedy: call backward before step(), or run the forward again"
            )
        if compat.current_graph_task_id() != -1:
            self.touch(group)
            self._sweep(group)
        self._runtime.gather.fetch(group)
        self._runtime.gather.prefetch()
        assert group.lease is not None
        with torch.inference_mode(False), torch.no_grad():
            flat = group.lease.tensor.view(handle.dtype)
            part = flat.as_strided(handle.shape, handle.stride, handle.offset)
            return part if handle.split is None else handle.split.wrap(part)

    @uninterrupted
    def on_gradient(self, param: ShardedParam, gradient: torch.Tensor) -> None:
        """Autograd has accumulated ``gradient`` into the real parameter, or into the placeholder where
        that was given to a custom autograd function (which bypasses ``__torch_function__``)."""
        group = param.group
        self._runtime.check_usable()
        nested = self._enter()
        self._runtime.updates.before_gradient(param, nested=nested)
        part = param.part_of(gradient.detach())
        if group.sharing.alone:
            self._runtime.gradients.accumulate(param, part)
        else:
            self._runtime.reducer.accumulate(param, part)
        self._accumulated.setdefault(group, set()).add(param.index)
        self._finish_if_done(group)

    def _sweep(self, current: ParamGroup) -> None:
        """Gives up what has become done without a gradient to tell (frozen groups)."""
        for group in list(self._live):
            if group is not current:
                self._finish_if_done(group)

    def _finish_if_done(self, group: ParamGroup) -> None:
        if group.handles or group.uses:
            return
        accumulated = self._accumulated.get(group, set())
        if all(p.index in accumulated for p in group.params if p.real.requires_grad):
            self._finish(group)

    def _finish(self, group: ParamGroup) -> None:
        """The running backward needs ``group`` no more, as far as can be known."""
        self._live.pop(group, None)
        if self._accumulated.pop(group, None):
            self._runtime.updates.after_backward(group)

    # ---- its beginning and end

    def _enter(self) -> bool:
        """Notices a backward; True if it is nested in another (reentrant checkpointing)."""
        task = compat.current_graph_task_id()
        if task == -1:
            return False
        if task in self._tasks:
            return task != self._outermost
        if self._tasks and not compat.is_executing(self._frame):
            self.forget_stale()
        if not self._tasks:
            self._outermost, self._frame = task, _engine_frame()
        self._tasks.add(task)
        compat.queue_end_of_backward(lambda: self._ended(task))
        return task != self._outermost

    @uninterrupted
    def _ended(self, task: int) -> None:
        self._tasks.discard(task)
        if task != self._outermost:
            return
        self._tasks.clear()
        self._outermost, self._frame = -1, None
        self._runtime.forward.pass_over = True
        for group in [*self._live, *(g for g in self._accumulated if g not in self._live)]:
            self._finish(group)
        self._runtime.reducer.end_backward()
        self._runtime.gradients.reap()
        self._runtime.gather.poll()
        self._runtime.gather.prefetch()
        for check in self.checks:
            check()

    def forget_stale(self) -> None:
        """Undoes what a failed backward has left; see [Note: stale backward]."""
        if not self._tasks or (
            compat.current_graph_task_id() != -1 and compat.is_executing(self._frame)
        ):
            return
        self._tasks.clear()
        self._outermost, self._frame = -1, None
        self._live.clear()
        self._runtime.reducer.forget_stale()
        accumulated, self._accumulated = self._accumulated, {}
        for group in accumulated:
            self._runtime.gradients.park(group)


def _engine_frame() -> FrameType | None:
    """The outermost frame that runs autograd's engine in this thread."""
    frame: FrameType | None = compat.caller_frame(1)
    found = None
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            found = frame
        frame = frame.f_back
    return found
