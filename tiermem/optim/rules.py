"""The arithmetic of the native optimizers on one slice of a region."""

from __future__ import annotations

from typing import Any

import torch

from tiermem.config import TierConfig
from tiermem.kernels import Kernels
from tiermem.optim.views import PlainView, StateView
from tiermem.types import Field
from tiermem.zero.rule import StateSpec, adamw_states


class AdamWRule:
    """AdamW on fp32 parameters, or on the masters of 16-bit ones (see [Note: masters])."""

    views: tuple[StateView, ...] = (PlainView("exp_avg"), PlainView("exp_avg_sq"))

    def __init__(self, config: TierConfig) -> None:
        self._config = config

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        return adamw_states(dtype, self._config)

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
