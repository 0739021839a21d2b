"""SGD with momentum over tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.optim.optimizer import ParamsT

from tiermem.config import TierConfig
from tiermem.errors import ConfigError
from tiermem.kernels import SGDStep
from tiermem.optim.base import TieredOptimizer
from tiermem.optim.options import check_numbers
from tiermem.optim.rules import SGDRule, sgd_states
from tiermem.zero.param import ShardedParam
from tiermem.zero.rule import StatePlan, UpdateRule, master_states
from tiermem.zero.runtime import Runtime


class SGD(TieredOptimizer):
    """Stochastic gradient descent, with momentum as `torch.optim.SGD` has it (Sutskever et al. 2013,
    and torch's ``dampening``); see `TieredOptimizer`.

    Arguments are those of `torch.optim.SGD`; ``lr`` may be a tensor. The momentum buffer is fp32; it is
    kept if momentum is not 0 where the optimizer is made. In fp32 the result is bit-equal to
    ``torch.optim.SGD(fused=True)`` (its vector path). ``state[param]`` has ``step`` beside torch's
    ``momentum_buffer``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        params = cast("ParamsT", list(params))
        given = [group for group in params if isinstance(group, dict)]
        self._keeps_momentum = any(g.get("momentum") for g in (defaults, *given))
        self._begun: set[ShardedParam] = set()  # whose buffer has had a gradient
        super().__init__(params, defaults, runtime=runtime)

    @classmethod
    def states_of(cls, **options: Any) -> StatePlan:
        """What it keeps, for ``tiermem.shard(..., states=...)``: with ``momentum=0.9``, for example, an
        fp32 buffer."""
        cls.check_options(options)
        return sgd_states if options.get("momentum") else master_states

    def _make_rule(self, config: TierConfig) -> UpdateRule:
        return SGDRule(config, momentum=self._keeps_momentum)

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for arguments that cannot work."""
        check_numbers(options, ("lr", "momentum", "weight_decay"))
        momentum, dampening = options.get("momentum", 0), options.get("dampening", 0)
        if options.get("nesterov") and (momentum == 0 or dampening != 0):
            raise ConfigError(
                f"nesterov=True with momentum {momentum} and dampening {dampening}; it needs a "
                f"momentum above 0 and no dampening"
            )

    def _check_options(self, options: Mapping[str, Any]) -> None:
        self.check_options(options)
        if options["momentum"] and not self._keeps_momentum:
            raise ConfigError(
                f"momentum is {options['momentum']}, but this optimizer was made without, and keeps no "
                f"buffer for it. Remedy: momentum in SGD(...) itself, or an optimizer of their own for "
                f"these parameters"
            )

    def _hyper(self, param: ShardedParam, options: Mapping[str, Any], scale: float) -> SGDStep:
        if options["momentum"] and not self._keeps_momentum:
            self._check_options(options)  # somebody has set it since
        sign = -1.0 if options["maximize"] else 1.0
        return SGDStep(
            lr=float(options["lr"]),
            momentum=float(options["momentum"]),
            dampening=float(options["dampening"]),
            weight_decay=float(options["weight_decay"]),
            nesterov=bool(options["nesterov"]),
            first=param not in self._begun,
            grad_scale=sign * scale,
        )

    def _same(self, param: ShardedParam, options: Mapping[str, Any], used: SGDStep) -> bool:
        return replace(self._hyper(param, options, 1.0), first=used.first) == used

    def _counted(self, param: ShardedParam, hyper: SGDStep) -> SGDStep:
        if hyper.momentum:
            self._begun.add(param)
        return hyper

    def state_comes(self, param: ShardedParam) -> None:
        self._begun.add(param)

    def _load_scalars(self, param: ShardedParam, saved: Mapping[str, Any] | None) -> None:
        # torch saves no step: a parameter that has a state was updated
        param.steps = 0 if saved is None else int(saved.get("step", 1))
        self._begun.discard(param)
        if saved is not None and saved.get("momentum_buffer") is not None:
            self._begun.add(param)

    @property
    def _number_keys(self) -> tuple[str, ...]:
        return ()
