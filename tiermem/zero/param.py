"""`ShardedParam`: one parameter of a group, whoever holds it.

[Note: held parameters] Some code keeps the real parameter object itself beyond its forward:
torch.utils.checkpoint keeps frozen weights of a recompute, a custom autograd function may stash a
weight on its context. Such an object must not lose its values under the holder. Every parameter's
Python reference count is noted when it is adopted; a parameter with more references at reshard
keeps its view of the lease (which therefore waits) and is detached later, when they are gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem.errors import StateError
from tiermem.zero import compat
from tiermem.zero.holders import num_dead_references
from tiermem.zero.layout import ParamSpec, Segment, Span
from tiermem.zero.placeholder import GradientStandIn, Placeholder, SplitPlaceholder
from tiermem.zero.split import Split

if TYPE_CHECKING:
    from tiermem.zero.group import ParamGroup, Region


@dataclass(slots=True)
class Slot:
    """A place in a module that names a parameter."""

    module: nn.Module
    name: str

    def put(self, value: nn.Parameter, instead_of: nn.Parameter) -> bool:
        """Swaps ``value`` in if the slot holds ``instead_of``; see [Note: swapping]."""
        parameters = self.module._parameters
        if parameters.get(self.name) is instead_of:
            parameters[self.name] = value
            return True
        return False


class ShardedParam:
    """One parameter of a group: the real one, its placeholder and the slots that name it."""

    __slots__ = (
        "_hooks",
        "_in_hook",
        "_part",
        "_references",
        "group",
        "index",
        "name",
        "placeholder",
        "real",
        "replicated",
        "slots",
        "split",
        "steps",
        "version",
    )

    def __init__(self, group: ParamGroup, index: int, name: str, real: nn.Parameter) -> None:
        self.group = group
        self.index = index
        self.name = name
        self.real = real
        self.split = Split.of(real)
        self._part = None if self.split is None else compat.local_tensor(real)
        self.slots: list[Slot] = []
        self.version = 0  # `written` when lease and store last agreed
        self.steps = 0  # optimizer updates of this parameter
        self.replicated: tuple[bool, ...] = ()  # over each of ``ParamGroup.across``
        self._hooks: Any = None
        self._in_hook = 0  # 1 while torch calls our hook with the real parameter as its argument
        self._references = sys.maxsize
        self.placeholder = (Placeholder if self.split is None else SplitPlaceholder)(self)
        for key, value in vars(real).items():  # what the model's code has noted on its parameters
            if self.split is None and not isinstance(value, torch.Tensor):
                vars(self.placeholder).setdefault(key, value)

    @property
    def segment(self) -> Segment:
        return self.group.layout.segments[self.index]

    @property
    def region(self) -> Region:
        """Its group's region that it lies in."""
        return self.group.regions[self.segment.region]

    @property
    def values(self) -> torch.Tensor:
        """Its elements in its group's lease, 1-D, in memory order."""
        segment = self.segment
        return self.group.region_view(self.region)[segment.start : segment.stop]

    @property
    def spec(self) -> ParamSpec:
        return self.segment.spec

    @property
    def inner(self) -> torch.Tensor:
        """The tensor whose memory comes and goes: the real parameter itself, or this rank's part of it
        where that is ``split``; see [Note: split parameters] (split.py)."""
        return self.real if self._part is None else self._part

    @property
    def shape(self) -> torch.Size:
        """As the user sees it; `spec` has that of this rank's part."""
        return self.spec.shape if self.split is None else self.split.shape

    @property
    def stride(self) -> tuple[int, ...]:
        return self.spec.stride if self.split is None else self.split.stride

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """What of ``value``, a tensor of the parameter's shape, belongs to ``inner``."""
        return value if self.split is None else self.split.part_of(value)

    def wrap(self, part: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape, of which ``part`` belongs to ``inner``."""
        return part if self.split is None else self.split.wrap(part)

    @property
    def written(self) -> int:
        """Changes whenever the values are written in a way that torch counts."""
        version = self.real._version
        return version if self._part is None else version + self._part._version

    @property
    def reduced(self) -> Span:
        """The elements, counted from the parameter's first, whose gradients this rank reduces."""
        segment = self.segment
        mine = self.region.shard.meet(segment.start, segment.stop)
        return Span(mine.start - segment.start, mine.stop - segment.start)

    @property
    def num_references(self) -> int:
        """References to the real parameter beside ours, right after it was taken over."""
        return sys.getrefcount(self.real) - 2  # our attribute's and the argument's

    def note_references(self) -> None:
        """Takes the present reference count as that of nobody but us."""
        self._references = sys.getrefcount(self.real)

    @property
    def held(self) -> bool:
        """Whether somebody else keeps the real parameter; see [Note: held parameters]. While a
        graph is alive, autograd's accumulator of a trainable parameter counts as one more."""
        return self._others > 0

    @property
    def _others(self) -> int:
        mine = self._references + self.real.requires_grad + self._in_hook
        return sys.getrefcount(self.real) - mine

    @property
    def held_by_dead_code(self) -> bool:
        """Whether all others that keep it are tracebacks; slow, see [Note: kept exceptions]."""
        return self._others <= num_dead_references(self.real)

    def listen(self) -> None:
        """(Re-)registers our accumulation hook as the last one, so that users' see the gradient.
        torch takes hooks on parameters with ``requires_grad`` only."""
        self.stop_listening()
        if not self.real.requires_grad:
            return
        backward = self.group.runtime.backward

        def accumulated(leaf: torch.Tensor) -> None:
            with compat.disable_torch_function():
                gradient, leaf.grad = leaf.grad, None
            hooked = leaf is self.real
            del leaf  # the traceback of an error must not keep it
            if gradient is None:
                return
            self._in_hook += hooked
            try:
                backward.on_gradient(self, gradient)
            finally:
                self._in_hook -= hooked

        with compat.disable_torch_function():
            self._hooks = [
                torch.Tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    leaf, accumulated
                )
                for leaf in (self.real, self.placeholder)
            ]

    def stop_listening(self) -> None:
        """Removes our hook. torch's garbage collection does not look into such hooks, so one that
        stays keeps parameter and runtime alive for ever."""
        for hook in self._hooks or ():
            hook.remove()
        self._hooks = None

    # ---- ParamHandle (see placeholder.py)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, params: Iterable[Any]) -> Any:
        forward = self.group.runtime.forward
        return forward.faulted_call(function, args, kwargs, list(dict.fromkeys(params)))

    def get_grad(self) -> torch.Tensor | None:
        if self.real.grad is not None:
            return self.real.grad
        if not any(
            own is not None and self.index in own.present
            for own in (self.group.gradient, self.group.partial)
        ):
            return None
        with compat.disable_torch_function():
            return GradientStandIn(self)

    def set_grad(self, value: torch.Tensor | None) -> None:
        self.real.grad = None
        if isinstance(value, GradientStandIn):
            own = self.group.gradient
            if value.stands_for(self) and own is not None and self.index in own.present:
                return  # what it is already
            raise StateError(
                f"the gradient that is assigned to {self.name!r} has left for its tier and has no "
                f"values here. Remedy: assign a copy, tiermem.full_grad(param), made while it was there"
            )
        with self.group.runtime.interrupts:
            self.group.runtime.gradients.replace(self, value)

    def get_data(self) -> torch.Tensor:
        if self.group.unsharded and self.group.runtime.forward.gathered_depth:
            return self.real.data
        raise StateError(
            f".data of {self.name!r} is not here: the parameter is sharded. Remedy: "
            f"with tiermem.gathered(params, modify=True): ..."
        )

    def set_data(self, value: torch.Tensor) -> None:
        """``param.data = value`` copies it, and counts as a write."""
        if not (self.group.unsharded and self.group.runtime.forward.gathered_depth):
            raise StateError(
                f"assigning .data on {self.name!r} is not possible: the parameter is sharded. Remedy: "
                f"with tiermem.gathered(params): ..."
            )
        if value.shape != self.shape or value.dtype != self.spec.dtype:
            raise StateError(
                f"data of shape {tuple(value.shape)} and {value.dtype} do not fit {self.name!r} "
                f"{tuple(self.shape)}, {self.spec.dtype}"
            )
        with torch.no_grad():
            self.inner.copy_(self.part_of(value))

    def set_requires_grad(self, value: bool) -> None:
        if value and not self.region.trainable:
            with self.group.runtime.interrupts:
                self.group.runtime.updates.make_trainable(self)
        self.real.requires_grad_(value)
        with compat.disable_torch_function():
            torch.Tensor.requires_grad_(self.placeholder, value)
        if self._hooks is None:
            self.listen()

    def follow_real(self) -> None:
        """After a block in which users had the real parameter: whether it is to have gradients, and a
        gradient that was assigned to it, count for the placeholder too."""
        if self.real.requires_grad != self.placeholder.requires_grad:
            self.set_requires_grad(self.real.requires_grad)
        if self.real.grad is not None:
            gradient, self.real.grad = self.real.grad, None
            self.set_grad(gradient)

    def add_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        handle = self.real.register_post_accumulate_grad_hook(hook)
        self.listen()
        return handle


def absent(spec: ParamSpec, device: torch.device) -> torch.Tensor:
    """The stand-in for the data of a sharded parameter: NaN (0 for integers), true shape."""
    value = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
    return torch.full((), value, dtype=spec.dtype, device=device).expand(spec.shape)
