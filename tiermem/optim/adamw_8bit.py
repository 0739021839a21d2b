"""AdamW and Adam over tiers with moments of one byte each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tiermem.config import TierConfig
from tiermem.kernels import Kernels, Moments8bit
from tiermem.kernels.base import QUANT_BLOCK_NUMEL
from tiermem.optim.adamw import Adam, AdamW
from tiermem.optim.options import check_adam_options
from tiermem.optim.rules import PlannedRule, master_of
from tiermem.types import Field
from tiermem.zero.group import Region
from tiermem.zero.param import ShardedParam
from tiermem.zero.rule import StatePlan, StateSpec, UpdateRule, master_states
from tiermem.zero.runtime import Runtime
from tiermem.zero.state_views import StateView, memory_order


@dataclass(frozen=True, slots=True)
class QuantizedView:
    """Codes of 8 bits under ``key`` and their scales under ``scales``, shown as fp32 values. What is
    read and written back gives the same codes and scales."""

    key: str
    scales: str
    signed: bool

    def read(self, runtime: Runtime, region: Region, param: ShardedParam) -> torch.Tensor:
        codes = runtime.states.read_values(region, self.key, param)
        scales = runtime.states.read_values(region, self.scales, param)
        values = torch.empty(codes.numel(), dtype=torch.float32)
        runtime.kernels.dequantize(codes, scales, values, signed=self.signed)
        return param.wrap(values.as_strided(param.spec.shape, param.spec.stride))

    def write(
        self, runtime: Runtime, region: Region, param: ShardedParam, value: torch.Tensor | None
    ) -> None:
        if value is None:
            for name in (self.key, self.scales):
                if name in region.initialised:
                    runtime.states.edit(region, name, param, lambda part: part.zero_())
            return
        values = memory_order(value, param, torch.float32).contiguous()
        codes = torch.empty(values.numel(), dtype=torch.uint8)
        count = region.states[self.scales].spec.count(values.numel())
        scales = torch.empty(count, dtype=torch.float32)
        runtime.kernels.quantize(values, codes, scales, signed=self.signed)
        runtime.states.write(region, self.key, param, codes)
        runtime.states.write(region, self.scales, param, scales)


def adamw_8bit_states(dtype: torch.dtype, config: TierConfig) -> tuple[StateSpec, ...]:
    """Two moments of a byte each with their scales, and what the master takes."""
    moments = [StateSpec(name, torch.uint8) for name in (Field.EXP_AVG, Field.EXP_AVG_SQ)]
    scales = [StateSpec(_scale(m.name), torch.float32, QUANT_BLOCK_NUMEL) for m in moments]
    return (*master_states(dtype, config), *moments, *scales)


class AdamW8bitRule(PlannedRule):
    """AdamW on moments of 8 bits."""

    views: tuple[StateView, ...] = (
        QuantizedView("exp_avg", "exp_avg_scale", signed=True),
        QuantizedView("exp_avg_sq", "exp_avg_sq_scale", signed=False),
    )

    def __init__(self, config: TierConfig) -> None:
        super().__init__(adamw_8bit_states, config)

    def apply(
        self,
        kernels: Kernels,
        hyper: Any,
        param: torch.Tensor,
        states: dict[str, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        moments = Moments8bit(
            states[Field.EXP_AVG],
            states[_scale(Field.EXP_AVG)],
            states[Field.EXP_AVG_SQ],
            states[_scale(Field.EXP_AVG_SQ)],
        )
        kernels.adamw_8bit(hyper, param, master_of(states), moments, gradient)


def _scale(name: str) -> str:
    return f"{name}_scale"


class _In8Bits(AdamW):
    """What `AdamW8bit` and `Adam8bit` have in place of fp32 moments."""

    @classmethod
    def states_of(cls, **options: Any) -> StatePlan:
        """What it keeps, for ``tiermem.shard(..., states=...)``."""
        check_adam_options(options)
        return adamw_8bit_states

    def _make_rule(self, config: TierConfig) -> UpdateRule:
        return AdamW8bitRule(config)


class AdamW8bit(_In8Bits):
    """`AdamW` with moments of one byte each: 8-bit floats, scaled by the largest of each block of 256
    (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1; the codes are
    our own, see ``Kernels.quantize``).

    Of 16-bit parameters it keeps 4 bytes an element with split masters, 6 with whole ones (K = 6), of
    fp32 parameters 2; and 8 more for every 256 elements. ``state[param]["exp_avg"]`` and
    ``"exp_avg_sq"`` are fp32; saving and loading them changes no bit.
    """


class Adam8bit(_In8Bits, Adam):
    """`AdamW8bit` with ``weight_decay`` added to the gradients, as `Adam` has it."""
