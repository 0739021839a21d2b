"""Finds out, by trying, what an optimizer class keeps and whether it works element by element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiermem.config import TierConfig
from tiermem.errors import ConfigError
from tiermem.optim.wrapped import WrappedOptimizer, same_value
from tiermem.zero.rule import StateSpec, master_states

_SHAPE = (8, 16)
_CUT = 32  # both slices are whole vectors of any processor: tails may round otherwise
_SIZES = (1.0, 1.0, 1.0, 1e-4, 1e3, 0.0, 1.0, 30.0, 1e5, 1e-2, 1.0, 1.0)
"""Of the gradients of each step: what clips, warms up or starts late is seen."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The states that have a value for each element, and the names of those that are one number."""

    specs: tuple[StateSpec, ...]
    numbers: frozenset[str]

    @property
    def per_element(self) -> frozenset[str]:
        return frozenset(spec.name for spec in self.specs)

    def plan(self, dtype: torch.dtype, config: TierConfig) -> tuple[StateSpec, ...]:
        """The same, and what the master takes; see `tiermem.zero.rule.StatePlan`."""
        return (*master_states(dtype, config), *self.specs)


def probe_all(wrapped: WrappedOptimizer, groups: Iterable[Mapping[str, Any]]) -> Probe:
    """What is kept with the defaults and with the options of each parameter group, together. Raises as
    `probe`."""
    found = probe(wrapped)
    specs, numbers = dict.fromkeys(found.specs), set(found.numbers)
    for group in groups:
        if group.keys() & wrapped.defaults.keys():
            more = probe(wrapped.changed(group))
            specs |= dict.fromkeys(more.specs)
            numbers |= more.numbers
    names = {spec.name for spec in specs}
    return Probe(tuple(specs), frozenset(numbers - names))


def probe(wrapped: WrappedOptimizer) -> Probe:
    """Steps on a small matrix, whole and in two slices, with the same gradients. Raises `ConfigError`,
    naming the class, if they ever differ: it is not element-wise then."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator)
    whole = nn.Parameter(start.clone())
    found, slices = None, None
    with torch.random.fork_rng(devices=[]):
        try:
            inner = wrapped.make(whole)
            inner.param_groups[0].update(wrapped.defaults)
            for size in _SIZES:
                whole.grad = torch.randn(_SHAPE, generator=generator) * size
                grad = whole.grad.flatten().clone()
                inner.step()
                if found is None or slices is None:
                    found = _describe(wrapped, inner.state[whole])
                    slices = _Slices(wrapped, found, start)
                slices.step(grad)
                slices.compare(whole.detach(), inner.state[whole])
        except ConfigError:
            raise
        except Exception as error:  # whatever somebody's optimizer raises
            raise _refused(wrapped, f"{type(error).__name__}: {error}") from error
    assert found is not None
    return found


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


class _Slices:
    """The same in two slices, as updates do it."""

    def __init__(self, wrapped: WrappedOptimizer, found: Probe, start: torch.Tensor) -> None:
        self._wrapped = wrapped
        self._param = start.flatten().clone()
        self._states = {s.name: torch.zeros(start.numel(), dtype=s.dtype) for s in found.specs}
        self._numbers: list[dict[str, Any]] = [{}, {}]
        self._steps = 0

    def step(self, grad: torch.Tensor) -> None:
        self._steps += 1
        for index, here in enumerate((slice(0, _CUT), slice(_CUT, None))):
            before = self._numbers[index]
            hyper = self._wrapped.freeze(self._wrapped.defaults, before, self._steps, 1.0)
            part = {name: values[here] for name, values in self._states.items()}
            self._numbers[index] = self._wrapped.update(hyper, self._param[here], part, grad[here])

    def compare(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Raises `ConfigError` if the whole parameter and its state are others."""
        same = same_value(param.flatten(), self._param)
        for name, values in self._states.items():
            same = same and same_value(state[name].flatten(), values)
        if not same:
            raise _refused(
                self._wrapped,
                "the result for an element depends on others (norms, factors, matrices) or on random "
                "numbers",
            )
        for numbers in self._numbers:
            for key, value in numbers.items():
                if not same_value(state.get(key), value):
                    raise _refused(self._wrapped, f"its {key!r} depends on all elements together")


def _refused(wrapped: WrappedOptimizer, why: str) -> ConfigError:
    return ConfigError(
        f"{wrapped.name} cannot run sharded, slice by slice: {why}. Remedy: an element-wise optimizer "
        f"(AdamW, Adam, SGD, Lion, Adagrad, RMSprop, NAdam, ...), or {wrapped.name} on a model that is "
        f"not sharded"
    )
