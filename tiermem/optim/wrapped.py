"""An ordinary optimizer class, run on one flat tensor at a time with state that is kept elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError, StateError
from tiermem.zero.rule import StateSpec

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class Frozen:
    """What one update of one parameter uses. ``numbers``: the state that is not a value per element,
    as it was before; None: the parameter was never updated, and the optimizer makes its state.
    ``after``: as every slice must leave it."""

    options: Mapping[str, Any]
    numbers: Mapping[str, Any] | None
    grad_scale: float
    after: Mapping[str, Any] | None = None

    def __eq__(self, other: object) -> bool:
        """Whether an update would do the same (``numbers`` follow from the updates before)."""
        if not isinstance(other, Frozen):
            return NotImplemented
        return self.grad_scale == other.grad_scale and _alike(self.options, other.options)

    __hash__ = None  # type: ignore[assignment]


def _alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(same_value(value, b[key]) for key, value in a.items())


def same_value(a: object, b: object) -> bool:
    """Whether two numbers, or whatever a state or an option holds, are the same; NaN is as NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    return type(a) is type(b) and (a == b or (a != a and b != b))


class WrappedOptimizer:
    """The class ``kind`` with arguments ``options``. Raises `ConfigError` if it cannot be made.

    [Note: wrapped optimizers] An instance is made for each slice, and sees nothing but it: a flat
    parameter, its gradient, and the state. What an instance would remember otherwise, in attributes or
    in its parameter group, would be lost; so an update that changes any of that raises, and so does one
    that comes to other numbers (``step``) than a step on a single zero did.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(
                f"Tiered takes a class of optimizers first, such as torch.optim.Adagrad, not {kind!r}"
            )
        self.kind = kind
        self.options = dict(options)
        self.defaults: dict[str, Any] = dict(self.make(torch.zeros(1)).defaults)

    @property
    def name(self) -> str:
        """Of the class."""
        return self.kind.__name__

    def changed(self, options: Mapping[str, Any]) -> WrappedOptimizer:
        """The same class with other defaults for its parameter groups: what of ``options`` it knows."""
        known = {key: value for key, value in options.items() if key in self.defaults}
        result = copy.copy(self)
        result.defaults = {**self.defaults, **known}
        return result

    def freeze(
        self, options: Mapping[str, Any], numbers: Mapping[str, Any] | None, steps: int, scale: float
    ) -> Frozen:
        """What an update uses: the options of a parameter group as they are now, and ``numbers``."""
        values = {k: copy.copy(v) for k, v in options.items() if k not in ("params", "param_names")}
        return Frozen(_copies(values), numbers if steps > 1 else None, scale)

    def update(
        self,
        hyper: Frozen,
        param: torch.Tensor,
        states: dict[str, torch.Tensor],
        gradient: torch.Tensor,
    ) -> dict[str, Any]:
        """Updates ``param`` (1-D, fp32) and ``states`` in place from ``gradient``; returns the numbers
        after it. Raises `StateError`; see [Note: wrapped optimizers]."""
        grad = gradient.to(torch.float32)
        if hyper.grad_scale != 1.0:
            grad = grad * torch.tensor(hyper.grad_scale, dtype=torch.float32)
        elif grad is gradient:
            grad = gradient.clone()  # some optimizers write to it
        numbers = {}
        for key, value in self._run(hyper, param, states, grad).items():
            if key not in states:
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    raise StateError(
                        f"{self.name} keeps {key!r} only after some steps; its states must be there "
                        f"from the first one on. Remedy: another optimizer, or no sharding"
                    )
                numbers[key] = value
            elif value is not None and value.data_ptr() != states[key].data_ptr():
                states[key].copy_(value)
        return numbers

    def _run(
        self,
        hyper: Frozen,
        param: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
    ) -> dict[str, Any]:
        """One step on ``param``; its state afterwards, as the optimizer has left it."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = nn.Parameter(param, requires_grad=True)
            leaf.grad = grad
            inner = self.make(leaf)
            inner.param_groups[0].update(_copies(hyper.options))
            if hyper.numbers is not None:
                inner.state[leaf] = {**copy.deepcopy(dict(hyper.numbers)), **states}
            before = _memory(inner)
            try:
                inner.step()
            except Exception as error:  # whatever somebody's optimizer raises
                raise StateError(
                    f"{self.name}.step() failed: {type(error).__name__}: {error}"
                ) from error
            if leaf.data_ptr() != param.data_ptr():  # it has put a new tensor in place
                param.copy_(leaf.detach())
        after = _memory(inner)
        for key in after.keys() | before.keys():
            if key not in before or key not in after or not same_value(before[key], after[key]):
                raise StateError(
                    f"{self.name}.step() changes {key!r} of itself or of its parameter group, to be "
                    f"kept for all parameters from step to step; that cannot work slice by slice"
                )
        return dict(inner.state[leaf])

    def numbers_after(self, hyper: Frozen, specs: Iterable[StateSpec]) -> dict[str, Any]:
        """What of the state is one number for the whole parameter, after an update with ``hyper``;
        ``specs`` are the rest."""
        states = {spec.name: torch.zeros(1, dtype=spec.dtype) for spec in specs}
        return self.update(hyper, torch.zeros(1), states, torch.zeros(1))

    def make(self, param: torch.Tensor) -> torch.optim.Optimizer:
        """One of the class, over ``param``."""
        leaf = param if isinstance(param, nn.Parameter) else nn.Parameter(param)
        try:
            return self.kind([leaf], **self.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.name} cannot be made over a flat slice with {self.options!r}: {error}"
            ) from error


def _copies(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def _memory(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an instance holds beside the state: plain attributes, and the options of its group."""
    own = {k: v for k, v in vars(optimizer).items() if isinstance(v, _PLAIN) and k[0] != "_"}
    group = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    return own | _copies(group)
