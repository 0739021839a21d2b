"""The arithmetic of AdamW on one slice of a region."""

from __future__ import annotations

from typing import Any

import torch

from tiermem.config import TierConfig
from tiermem.kernels import Kernels
from tiermem.types import Field
from tiermem.zero.masters import master_state

_MOMENTS = ((Field.EXP_AVG, torch.float32), (Field.EXP_AVG_SQ, torch.float32))


class AdamWRule:
    """AdamW on fp32 parameters, or on the masters of 16-bit ones (see [Note: masters])."""

    def __init__(self, config: TierConfig) -> None:
        self._config = config

    def state_fields(self, dtype: torch.dtype) -> tuple[tuple[Field, torch.dtype], ...]:
        master = master_state(dtype, self._config)
        return _MOMENTS if master is None else (master, *_MOMENTS)

    def apply(
        self,
        kernels: Kernels,
        hyper: Any,
        param: torch.Tensor,
        states: dict[Field, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        avg, avg_sq = states[Field.EXP_AVG], states[Field.EXP_AVG_SQ]
        if Field.MASTER_LO in states:
            kernels.adamw_split(hyper, param, states[Field.MASTER_LO], avg, avg_sq, gradient)
        elif Field.MASTER in states:
            kernels.adamw_master(hyper, param, states[Field.MASTER], avg, avg_sq, gradient)
        else:
            kernels.adamw_fp32(hyper, param, avg, avg_sq, gradient)
