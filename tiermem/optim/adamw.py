"""AdamW and Adam over tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tiermem.config import TierConfig
from tiermem.kernels import AdamWStep
from tiermem.optim.base import TieredOptimizer
from tiermem.optim.options import check_adam_options
from tiermem.optim.rules import AdamWRule
from tiermem.zero.param import ShardedParam
from tiermem.zero.rule import StatePlan, UpdateRule, adamw_states
from tiermem.zero.runtime import Runtime


class AdamW(TieredOptimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on sharded parameters; see `TieredOptimizer`.

    Arguments are those of `torch.optim.AdamW`; ``lr`` may be a tensor. ``amsgrad`` is not supported
    here (``Tiered(torch.optim.AdamW, params, amsgrad=True)`` is). In fp32 the result is bit-equal to
    ``torch.optim.AdamW(fused=True)`` (its vector path; torch's own tails depend on how it slices).
    """

    _decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults, runtime=runtime)

    @classmethod
    def states_of(cls, **options: Any) -> StatePlan:
        """What it keeps, for ``tiermem.shard(..., states=...)``."""
        check_adam_options(options)
        return adamw_states

    def _make_rule(self, config: TierConfig) -> UpdateRule:
        return AdamWRule(config)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_adam_options(options)

    def _hyper(self, param: ShardedParam, options: Mapping[str, Any], scale: float) -> AdamWStep:
        beta1, beta2 = options["betas"]
        sign = -1.0 if options["maximize"] else 1.0
        return AdamWStep(
            lr=float(options["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            step=param.steps,
            grad_scale=sign * scale,
            decoupled=self._decoupled,
        )


class Adam(AdamW):
    """Adam (Kingma and Ba 2015, algorithm 1) with ``weight_decay`` added to the gradients (L2).

    Arguments are those of `torch.optim.Adam`; everything else as for `AdamW`.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, runtime=runtime
        )
