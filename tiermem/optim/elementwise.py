"""`Tiered`: any element-wise `torch.optim.Optimizer`, slice by slice over offloaded state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.optim.optimizer import ParamsT

from tiermem.config import TierConfig
from tiermem.errors import ConfigError, StateError
from tiermem.kernels import Kernels
from tiermem.optim.base import TieredOptimizer
from tiermem.optim.probe import Probe, probe, probe_all
from tiermem.optim.rules import PlannedRule
from tiermem.optim.wrapped import Frozen, WrappedOptimizer, same_value
from tiermem.types import Field
from tiermem.zero.masters import store_master
from tiermem.zero.param import ShardedParam
from tiermem.zero.rule import StatePlan
from tiermem.zero.runtime import Runtime
from tiermem.zero.state_views import PlainView, StateView

CHUNK_NUMEL = 1 << 18
"""Elements that the wrapped optimizer sees at a time: its temporaries, which no budget knows, stay
at 1 MiB each. A multiple of any vector width, so that cutting changes no bit."""


class Tiered(TieredOptimizer):
    """``Tiered(torch.optim.Adagrad, model.parameters(), lr=1e-2)``: ``optimizer`` is a class of
    ordinary optimizers, torch's or anybody's, and ``options`` are its arguments.

    Its own ``step()`` runs on slices of the fp32 masters, with fp32 gradients and its own state, so
    that the result is that of the unsharded optimizer to the bit. It has to be element-wise: what
    happens to an element must not depend on others. That is tried on small tensors first; one that
    couples elements (by norms, low rank, matrix factors) or draws random numbers is refused with
    `ConfigError` by name. States that are numbers (``step``) are kept per parameter; ``state_dict`` is
    that of the wrapped class, with ``master`` for 16-bit parameters.

    Slower than `AdamW`, `Adam` and `SGD` of `tiermem.optim`, which do all in one pass over memory.
    """

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        params: ParamsT,
        *,
        runtime: Runtime | None = None,
        **options: Any,
    ) -> None:
        self._wrapped = WrappedOptimizer(optimizer, options)
        params = cast("ParamsT", list(params))
        self._probe = probe_all(self._wrapped, [p for p in params if isinstance(p, dict)])
        self._numbers: dict[ShardedParam, dict[str, Any]] = {}  # of each updated parameter
        super().__init__(params, self._wrapped.defaults, runtime=runtime)

    @property
    def wrapped(self) -> type[torch.optim.Optimizer]:
        """The class whose updates these are."""
        return self._wrapped.kind

    @staticmethod
    def states_of(
        optimizer: type[torch.optim.Optimizer],
        groups: Iterable[Mapping[str, Any]] = (),
        **options: Any,
    ) -> StatePlan:
        """For ``tiermem.shard(..., states=...)``; ``groups`` are parameter groups with options of their
        own. Raises `ConfigError` as `Tiered` does."""
        return probe_all(WrappedOptimizer(optimizer, options), groups).plan

    def _make_rule(self, config: TierConfig) -> _WrappedRule:
        return _WrappedRule(self._wrapped, self._probe, config)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        found = probe(self._wrapped.changed(options))
        missing = found.per_element - self._probe.per_element
        if missing:
            raise ConfigError(
                f"with these options {self._wrapped.name} keeps {', '.join(sorted(missing))}, which it "
                f"does not with those that this optimizer was made with. Remedy: give such a group "
                f"when the optimizer is made, or these parameters an optimizer of their own"
            )

    def _hyper(self, param: ShardedParam, options: Mapping[str, Any], scale: float) -> Frozen:
        return self._wrapped.freeze(options, self._numbers.get(param), param.steps, scale)

    def _counted(self, param: ShardedParam, hyper: Frozen) -> Frozen:
        after = self._wrapped.numbers_after(hyper, self._probe.specs)
        self._numbers[param] = after
        return replace(hyper, after=after)

    def state_comes(self, param: ShardedParam) -> None:
        if param not in self._numbers:
            raise StateError(
                f"{self._wrapped.name} makes the state of {param.name!r} in its first update. Remedy: "
                f"set it after that, or load a state_dict"
            )

    def _scalars(self, param: ShardedParam) -> dict[str, Any]:
        return self._numbers.get(param, {})

    def _load_scalars(self, param: ShardedParam, saved: Mapping[str, Any] | None) -> None:
        if saved is None:
            param.steps = 0
            self._numbers.pop(param, None)
            return
        self._numbers[param] = {key: copy.deepcopy(saved[key]) for key in self._probe.numbers}
        param.steps = max(1, int(saved["step"]) if "step" in saved else 1)

    @property
    def _number_keys(self) -> tuple[str, ...]:
        return tuple(sorted(self._probe.numbers))


class _WrappedRule(PlannedRule):
    """The wrapped optimizer on slices of masters."""

    def __init__(self, wrapped: WrappedOptimizer, found: Probe, config: TierConfig) -> None:
        super().__init__(found.plan, config)
        self._wrapped = wrapped
        self._specs = found.specs
        self.views: tuple[StateView, ...] = tuple(PlainView(spec.name) for spec in found.specs)

    def apply(
        self,
        kernels: Kernels,
        hyper: Any,
        param: torch.Tensor,
        states: dict[str, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        for start in range(0, param.numel(), CHUNK_NUMEL):
            here = slice(start, start + CHUNK_NUMEL)
            self._apply_to(
                kernels, hyper, param[here], {k: s[here] for k, s in states.items()}, gradient[here]
            )

    def _apply_to(
        self,
        kernels: Kernels,
        hyper: Frozen,
        param: torch.Tensor,
        states: dict[str, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        master, kept = param, states.get(Field.MASTER)
        if Field.MASTER_LO in states:
            master = torch.empty(param.numel(), dtype=torch.float32)
            kept = states[Field.MASTER_LO]
            kernels.merge_master(param, kept, master)
        elif kept is not None:
            master = kept
        own = {spec.name: states[spec.name] for spec in self._specs}
        numbers = self._wrapped.update(hyper, master, own, gradient)
        for key, expected in (hyper.after or {}).items():
            if not same_value(numbers.get(key), expected):
                raise StateError(
                    f"{self._wrapped.name} keeps a {key!r} that depends on the values of all elements "
                    f"together; that cannot work slice by slice. Remedy: another optimizer"
                )
        if kept is not None:
            store_master(kernels, master, param, kept)
