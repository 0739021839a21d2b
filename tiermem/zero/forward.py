"""What happens around a forward: units are entered and left, functions are faulted in.

[Note: forward stack] Each module call that owns groups pushes an entry. Hooks run on exceptions too
(``always_call``), but not on KeyboardInterrupt, so every entry remembers the Python frame of its
module call: an entry whose frame is no longer executing is stale and is undone at the next entry.

[Note: packing context] Saved tensors that lie in a lease are packed as handles (see backward.py)
by ``torch.autograd.graph.saved_tensors_hooks``. The outermost entry or faulted call opens that
context, since models are called through sub-modules too. torch applies only the innermost pair of
hooks, so a pair of the user's that is already active is chained behind ours; the pair of
torch.utils.checkpoint, which does not save but recomputes, is left in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tiermem.errors import StateError
from tiermem.zero import compat
from tiermem.zero.group import ParamGroup, ShardedState
from tiermem.zero.interrupts import uninterrupted

if TYPE_CHECKING:
    from tiermem.zero.param import ShardedParam
    from tiermem.zero.runtime import Runtime


@dataclass(slots=True, eq=False)
class Unit:
    """A module with hooks and the groups it needs."""

    module: nn.Module
    name: str
    groups: list[ParamGroup]


@dataclass(slots=True, eq=False)
class _Entry:
    unit: Unit
    frame: FrameType | None
    groups: list[ParamGroup]
    context: _Context | None


@dataclass(slots=True)
class _Use:
    """A use of groups outside of their modules' forward."""

    groups: Sequence[ParamGroup]
    params: Sequence[ShardedParam] | None = None  # only these, which nobody looks for in modules
    lent: dict[ParamGroup, list[ShardedParam]] = field(default_factory=dict)  # of groups not unsharded
    counted: bool = False
    context: _Context | None = None


class _Context:
    """An open packing context with what has to be restored."""

    __slots__ = ("_autocast_cache", "_hooks")

    def __init__(self, hooks: saved_tensors_hooks) -> None:
        self._hooks = hooks
        try:
            hooks.__enter__()
        except RuntimeError as error:
            raise StateError(
                f"sharded parameters need saved-tensor hooks in forward, which are disabled here: "
                f"{error}. Remedy: call the model outside of "
                f"torch.autograd.graph.disable_saved_tensors_hooks and torch.func transforms, or "
                f"with torch.func.functional_call and tensors of your own"
            ) from error
        self._autocast_cache = compat.set_autocast_cache(False)

    def close(self) -> None:
        compat.set_autocast_cache(self._autocast_cache)
        self._hooks.__exit__(None, None, None)


class ForwardTracker:
    """See the notes above. Training thread only."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stack: list[_Entry] = []
        self._thread = 0  # whose stack it is
        self._open = False
        self._pass_unit: Unit | None = None
        self._pass_training = False
        self.pass_over = True  # a backward or a step has ended the pass
        self.gathered_depth = 0

    # ---- hooks

    def install(self, unit: Unit) -> list[Any]:
        """Registers the hooks of ``unit``; their handles."""
        enter = torch.compiler.disable(lambda module, args: self.enter(unit))
        leave = torch.compiler.disable(lambda module, args, output: self.leave(unit))
        return [
            unit.module.register_forward_pre_hook(enter, prepend=True),
            unit.module.register_forward_hook(leave, always_call=True),
        ]

    @uninterrupted
    def enter(self, unit: Unit) -> None:
        self._runtime.check_usable()
        self._check_context()
        self._drop_stale()
        if compat.inside_distributed_data_parallel():
            raise StateError(
                "a sharded model cannot run inside DistributedDataParallel. Remedy: use the sharded "
                "model itself; tiermem reduces gradients over its own process group"
            )
        in_backward = compat.current_graph_task_id() != -1
        groups = [group for group in unit.groups if _named_here(group)]
        if not self._stack and not in_backward:
            self._runtime.backward.forget_stale()
            self._begin_pass(unit)
        context = self._open_context() if groups else None
        entry = _Entry(unit, _module_call_frame(), groups, context)
        self._stack.append(entry)
        try:
            for group in groups:
                group.uses += 1
            if in_backward:
                for group in groups:
                    self._runtime.backward.touch(group)
            self._runtime.gather.unshard_together(groups)
        except BaseException:
            self._stack.pop()
            self._undo(entry)
            raise
        self._runtime.gather.prefetch()

    @uninterrupted
    def leave(self, unit: Unit) -> None:
        frame = _module_call_frame()
        if not any(entry.frame is frame and entry.unit is unit for entry in self._stack):
            return  # its enter failed and has undone itself
        while self._stack:
            entry = self._stack.pop()
            self._undo(entry)
            if entry.frame is frame and entry.unit is unit:
                return

    def _undo(self, entry: _Entry) -> None:
        try:
            for group in entry.groups:
                self.release(group)
        finally:
            if entry.context is not None:
                self._close_context(entry.context)

    def release(self, group: ParamGroup) -> None:
        """One use less. A group that a running backward needs keeps its lease (`BackwardTracker`)."""
        group.uses -= 1
        if group.uses == 0:
            self._runtime.gather.reshard(group)

    def _check_context(self) -> None:
        """Refuses what cannot be right here."""
        if compat.inside_forward_mode():
            raise StateError(
                "forward-mode transforms (torch.func.jvp, jacfwd) cannot run on sharded parameters. "
                "Remedy: torch.func.functional_call with tensors of your own, or reverse mode"
            )
        if not self._stack:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident() and compat.current_graph_task_id() == -1:
            if id(self._stack[-1].frame) in compat.running_frames():
                raise StateError(
                    "another thread is inside a forward of this runtime. Remedy: one thread at a time, "
                    "or a runtime for each"
                )
            self._thread = threading.get_ident()  # what it has left is stale

    def _drop_stale(self) -> None:
        while self._stack and not compat.is_executing(self._stack[-1].frame):
            self._undo(self._stack.pop())

    def _begin_pass(self, unit: Unit) -> None:
        training = torch.is_grad_enabled()
        if self.pass_over or unit is self._pass_unit or training != self._pass_training:
            self._pass_unit, self._pass_training, self.pass_over = unit, training, False
            self._runtime.gather.begin_pass(training)

    # ---- packing context

    def _open_context(self) -> _Context | None:
        if self._open:
            return None
        outer = compat.top_saved_tensor_hooks()
        if outer is not None and compat.is_checkpoint_hook(outer[0]):
            return None
        packer = self._runtime.backward.packer(outer)
        try:
            context = _Context(saved_tensors_hooks(packer.pack, packer.unpack))
        except StateError:
            if torch.is_grad_enabled():
                raise
            return None  # nothing will be saved
        self._open = True
        return context

    def _close_context(self, context: _Context) -> None:
        self._open = False
        context.close()

    # ---- uses outside of a module's own forward

    def faulted_call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        params: Sequence[ShardedParam],
    ) -> Any:
        """Runs ``function`` on the real ``params``, gathered for the call. Others of their groups, of
        which there may be thousands, and the modules' slots are left as they are."""
        use = _Use(list(dict.fromkeys(param.group for param in params)), params)
        try:
            self._begin_use(use, pack=True)
            return function(*args, **kwargs)
        finally:
            self._end_use(use)

    @contextmanager
    def gathered(self, groups: Sequence[ParamGroup], *, modify: bool) -> Iterator[None]:
        """Holds ``groups`` unsharded; see `tiermem.gathered`."""
        use = _Use(groups)
        try:
            self._begin_use(use)
            self.gathered_depth += 1
            try:
                yield
            finally:
                self.gathered_depth -= 1
                self._adopt(groups)
        finally:
            self._end_use(use, modified=modify)
        for group in groups:
            for param in group.params:
                param.follow_real()

    @uninterrupted
    def _adopt(self, groups: Sequence[ParamGroup]) -> None:
        """What a block has put in place of parameters' data counts as written."""
        with torch.inference_mode(False), torch.no_grad():
            for group in groups:
                if group.unsharded and group.lease is not None and not group.unsettled:
                    group.written.update(dict.fromkeys(group.adopt_replaced()))

    @uninterrupted
    def _begin_use(self, use: _Use, *, pack: bool = False) -> None:
        """Unshards the groups of ``use``, with a packing context if one is needed."""
        self._runtime.check_usable()
        self._check_context()
        self._drop_stale()
        if pack and torch.is_grad_enabled():
            use.context = self._open_context()
        for group in use.groups:
            group.uses += 1
        use.counted = True
        if compat.current_graph_task_id() != -1:
            for group in use.groups:
                self._runtime.backward.touch(group)
        traced = pack and bool(self._stack)
        if use.params is None:
            self._runtime.gather.unshard_together(use.groups, traced=traced)
            return
        self._runtime.gather.fetch_together(use.groups, traced=traced)
        for param in use.params:
            if not param.group.unsharded:
                use.lent.setdefault(param.group, []).append(param)
        for group, lent in use.lent.items():
            group.attach(lent)

    @uninterrupted
    def _end_use(self, use: _Use, *, modified: bool = False) -> None:
        """Undoes as much of `_begin_use` as was done."""
        if use.context is not None:
            self._close_context(use.context)
        if not use.counted:
            return
        try:
            for group in use.groups:
                unsharded = group.state is ShardedState.UNSHARDED
                self._runtime.gather.settle(group, force=modified and unsharded)
        finally:
            for group, lent in use.lent.items():
                if not group.unsharded and group.lease is not None and not group.detach(lent):
                    self._runtime.gather.room.lingering.add(group)
            for group in use.groups:  # also those after one whose write failed
                self.release(group)

    @uninterrupted
    def close(self) -> None:
        while self._stack:
            self._undo(self._stack.pop())


def _named_here(group: ParamGroup) -> bool:
    """Whether any slot names the group's own parameters (not foreign tensors put there by
    ``torch.func.functional_call``)."""
    for param in group.params:
        for slot in param.slots:
            value = slot.module._parameters.get(slot.name)
            if value is param.placeholder or value is param.real:
                return True
    return False


def _module_call_frame() -> FrameType | None:
    """The frame of the ``nn.Module`` call whose hook is running."""
    frame: FrameType | None = compat.caller_frame(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame
