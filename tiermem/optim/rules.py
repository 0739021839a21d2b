"""The arithmetic of the native optimizers on one slice of a region."""

from __future__ import annotations

from typing import Any

import torch

from tiermem.config import TierConfig
from tiermem.kernels import Kernels
from tiermem.types import Field
from tiermem.zero.rule import StatePlan, StateSpec, adamw_states, master_states
from tiermem.zero.state_views import PlainView, StateView


class PlannedRule:
    """What every rule has that keeps the states of ``plan`` under ``config``."""

    def __init__(self, plan: StatePlan, config: TierConfig) -> None:
        self._plan = plan
        self._config = config

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        return self._plan(dtype, self._config)


class AdamWRule(PlannedRule):
    """AdamW on fp32 parameters, or on the masters of 16-bit ones (see [Note: masters])."""

    views: tuple[StateView, ...] = (PlainView("exp_avg"), PlainView("exp_avg_sq"))

    def __init__(self, config: TierConfig) -> None:
        super().__init__(adamw_states, config)

    def apply(
        self,
        kernels: Kernels,
        hyper: Any,
        param: torch.Tensor,
        states: dict[str, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        avg, avg_sq = states[Field.EXP_AVG], states[Field.EXP_AVG_SQ]
        if Field.MASTER_LO in states:
            kernels.adamw_split(hyper, param, states[Field.MASTER_LO], avg, avg_sq, gradient)
        elif Field.MASTER in states:
            kernels.adamw_master(hyper, param, states[Field.MASTER], avg, avg_sq, gradient)
        else:
            kernels.adamw_fp32(hyper, param, avg, avg_sq, gradient)


_MOMENTUM = "momentum_buffer"


def sgd_states(dtype: torch.dtype, config: TierConfig) -> tuple[StateSpec, ...]:
    """An fp32 momentum buffer, and what the master takes."""
    return (*master_states(dtype, config), StateSpec(_MOMENTUM, torch.float32))


class SGDRule(PlannedRule):
    """SGD, with or without a momentum buffer."""

    def __init__(self, config: TierConfig, *, momentum: bool) -> None:
        super().__init__(sgd_states if momentum else master_states, config)
        self.views: tuple[StateView, ...] = (PlainView(_MOMENTUM),) if momentum else ()

    def apply(
        self,
        kernels: Kernels,
        hyper: Any,
        param: torch.Tensor,
        states: dict[str, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        momentum = states[_MOMENTUM] if hyper.momentum else None
        kernels.sgd(hyper, param, master_of(states), momentum, gradient)


def master_of(states: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The state that keeps the masters, if there is one."""
    return states.get(Field.MASTER_LO, states.get(Field.MASTER))
