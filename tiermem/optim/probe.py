"""Finds out, by trying, what an optimizer class keeps and whether it works element by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.optim.wrapped import WrappedOptimizer
from tiermem.zero.rule import StateSpec

_SHAPE = (8, 16)
_CUT = 32  # both slices are whole vectors of any processor: tails may round otherwise
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Probe:
    """The states that have a value for each element, and the names of those that are one number."""

    specs: tuple[StateSpec, ...]
    numbers: frozenset[str]

    @property
    def per_element(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.specs)


def probe(wrapped: WrappedOptimizer) -> Probe:
    """Three steps on a small matrix, whole and in two slices, with the same gradients. Raises
    `ConfigError`, naming the class, if they differ: it is not element-wise then."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    grads = [torch.randn(_SHAPE, generator=generator) for _ in range(_STEPS)]
    with torch.random.fork_rng(devices=[]):
        try:
            param, state = _whole(wrapped, start, grads)
            found = _describe(wrapped, state)
            cut_param, cut_states, numbers = _in_slices(wrapped, found, start, grads)
        except ConfigError:
            raise
        except Exception as error:  # whatever somebody's optimizer raises
            raise _refused(wrapped, f"{type(error).__name__}: {error}") from error
    same = _equal(param.flatten(), cut_param) and all(
        _equal(state[name].flatten(), values) for name, values in cut_states.items()
    )
    if not same:
        raise _refused(
            wrapped,
            "the result for an element depends on others (norms, factors, matrices), on random "
            "numbers, or on counts in its parameter groups",
        )
    for key in found.numbers:
        if any(not _same_number(state[key], each[key]) for each in numbers):
            raise _refused(wrapped, f"its {key!r} depends on all elements together")
    return found


def _whole(
    wrapped: WrappedOptimizer, start: torch.Tensor, grads: list[torch.Tensor]
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    leaf = nn.Parameter(start.clone())
    inner = wrapped.make(leaf)
    inner.param_groups[0].update(wrapped.defaults)
    for grad in grads:
        leaf.grad = grad.clone()
        inner.step()
    return leaf.detach(), inner.state[leaf]


def _describe(wrapped: WrappedOptimizer, state: Mapping[str, Any]) -> Probe:
    specs, numbers = [], set()
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            numbers.add(key)
        elif tuple(value.shape) == _SHAPE:
            specs.append(StateSpec(key, value.dtype))
        else:
            raise _refused(
                wrapped,
                f"for a parameter of shape {_SHAPE} its {key!r} has shape {tuple(value.shape)}; every "
                f"state must be a number, or have a value for each element",
            )
    return Probe(tuple(specs), frozenset(numbers))


def _in_slices(
    wrapped: WrappedOptimizer, found: Probe, start: torch.Tensor, grads: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[dict[str, Any]]]:
    param = start.flatten().clone()
    states = {spec.name: torch.zeros(param.numel(), dtype=spec.dtype) for spec in found.specs}
    numbers: list[dict[str, Any]] = [{}, {}]
    for step, grad in enumerate(grads, start=1):
        for index, here in enumerate((slice(0, _CUT), slice(_CUT, None))):
            hyper = wrapped.freeze(wrapped.defaults, numbers[index], step, 1.0)
            part = {name: values[here] for name, values in states.items()}
            numbers[index] = wrapped.update(hyper, param[here], part, grad.flatten()[here])
    return param, states, numbers


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _same_number(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _equal(a.flatten(), b.flatten())
    return bool(a == b)


def _refused(wrapped: WrappedOptimizer, why: str) -> ConfigError:
    return ConfigError(
        f"{wrapped.name} cannot run sharded, slice by slice: {why}. Remedy: an element-wise optimizer "
        f"(AdamW, Adam, SGD, Lion, Adagrad, RMSprop, NAdam, ...), or {wrapped.name} on a model that is "
        f"not sharded"
    )
