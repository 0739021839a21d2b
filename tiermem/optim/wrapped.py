"""An ordinary optimizer class, run on one flat tensor at a time with state that is kept elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Frozen:
    """What one update of one parameter uses. ``numbers``: the state that is not a value per element,
    as it was before; None: the parameter was never updated, and the optimizer makes its state."""

    options: Mapping[str, Any]
    numbers: Mapping[str, Any] | None
    grad_scale: float

    def __eq__(self, other: object) -> bool:
        """Whether an update would do the same (``numbers`` follow from the updates before)."""
        if not isinstance(other, Frozen):
            return NotImplemented
        same_keys = self.options.keys() == other.options.keys()
        return (
            same_keys
            and self.grad_scale == other.grad_scale
            and all(_same(value, other.options[key]) for key, value in self.options.items())
        )

    __hash__ = None  # type: ignore[assignment]


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and a == b


class WrappedOptimizer:
    """The class ``kind`` with arguments ``options``. Raises `ConfigError` if it cannot be made."""

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
        """The same class with other defaults for its parameter groups."""
        result = copy.copy(self)
        result.defaults = {**self.defaults, **options}
        return result

    def freeze(
        self, options: Mapping[str, Any], numbers: Mapping[str, Any] | None, steps: int, scale: float
    ) -> Frozen:
        """What an update uses: the options of a parameter group as they are now, and ``numbers``."""
        values = {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
            for key, value in options.items()
            if key not in ("params", "param_names")
        }
        return Frozen(values, numbers if steps > 1 else None, scale)

    def update(
        self,
        hyper: Frozen,
        param: torch.Tensor,
        states: dict[str, torch.Tensor],
        gradient: torch.Tensor,
    ) -> dict[str, Any]:
        """Updates ``param`` (1-D, fp32) and ``states`` in place from ``gradient``; returns the numbers
        after it."""
        grad = gradient.to(torch.float32)
        if hyper.grad_scale != 1.0:
            grad = grad * torch.tensor(hyper.grad_scale, dtype=torch.float32)
        elif grad is gradient:
            grad = gradient.clone()  # some optimizers write to it
        after = self.run(hyper, param, None if hyper.numbers is None else states, grad)
        numbers = {}
        for key, value in after.items():
            if key not in states:
                numbers[key] = value
            elif value is not None and value.data_ptr() != states[key].data_ptr():
                states[key].copy_(value)
        return numbers

    def run(
        self,
        hyper: Frozen,
        param: torch.Tensor,
        states: Mapping[str, torch.Tensor] | None,
        grad: torch.Tensor,
    ) -> dict[str, Any]:
        """One step on ``param``; its state afterwards, as the optimizer has left it. ``states`` None:
        the optimizer makes its state."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = nn.Parameter(param, requires_grad=True)
            leaf.grad = grad
            inner = self.make(leaf)
            inner.param_groups[0].update(hyper.options)
            if states is not None:
                inner.state[leaf] = {**copy.deepcopy(dict(hyper.numbers or {})), **states}
            inner.step()
            if leaf.data_ptr() != param.data_ptr():  # it has put a new tensor in place
                param.copy_(leaf.detach())
            return dict(inner.state[leaf])

    def numbers_after(self, hyper: Frozen, per_element: Iterable[str]) -> dict[str, Any]:
        """What of the state is one number for the whole parameter, after an update with ``hyper``;
        ``per_element`` names the rest. Such numbers do not depend on values (see `probe`)."""
        states = {name: torch.zeros(1) for name in per_element}
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
