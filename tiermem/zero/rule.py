"""What an element-wise optimizer tells the runtime: the states that it keeps, and its arithmetic.

[Note: state blocks] A state has one value for each element of a parameter, or one for each block of
``block_numel`` elements (the scales of 8-bit moments). Blocks are counted from the start of a region;
parameters, shards and update slices start on block bounds (`tiermem.zero.layout`), so a block never
belongs to two of them, and its values do not depend on how a region is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tiermem.config import TierConfig
from tiermem.kernels import Kernels
from tiermem.schedule.placement import SlotShape
from tiermem.types import ALIGNMENT, Field, round_up
from tiermem.zero.masters import master_state

if TYPE_CHECKING:
    from tiermem.zero.state_views import StateView


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state: its name, the dtype of its values, and how many elements share one; see [Note: state
    blocks]."""

    name: str
    dtype: torch.dtype
    block_numel: int = 1

    def count(self, numel: int) -> int:
        """Values for ``numel`` elements from a block bound on."""
        return -(-numel // self.block_numel)

    def nbytes(self, numel: int) -> int:
        """Bytes of the values for ``numel`` elements from a block bound on."""
        return self.count(numel) * self.dtype.itemsize

    @property
    def granule_numel(self) -> int:
        """Elements after which values end on a multiple of 4096 bytes."""
        return self.block_numel * ALIGNMENT // math.gcd(ALIGNMENT, self.dtype.itemsize)


class UpdateRule(Protocol):
    """An element-wise optimizer, applied to slices."""

    @property
    def views(self) -> tuple[StateView, ...]:
        """What users see of the states, beside the step count and the master."""

    def states(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """The states of a region of ``dtype``, beside the parameter itself; the master among them
        (see [Note: masters])."""

    def apply(
        self,
        kernels: Kernels,
        hyper: Any,
        param: torch.Tensor,
        states: dict[str, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        """Updates a slice in place: ``param`` and ``gradient`` are 1-D of one length, ``states`` are
        their values for it. On any thread."""


StatePlan = Callable[[torch.dtype, TierConfig], tuple[StateSpec, ...]]
"""The states of a region of a dtype under a configuration, for budgets before there is an optimizer."""


def master_states(dtype: torch.dtype, config: TierConfig) -> tuple[StateSpec, ...]:
    """The state in which masters of ``dtype`` are kept, if there is one."""
    master = master_state(dtype, config)
    return () if master is None else (StateSpec(*master),)


def adamw_states(dtype: torch.dtype, config: TierConfig) -> tuple[StateSpec, ...]:
    """Two fp32 moments, and what the master takes."""
    moments = (StateSpec(Field.EXP_AVG, torch.float32), StateSpec(Field.EXP_AVG_SQ, torch.float32))
    return (*master_states(dtype, config), *moments)


def state_bytes(specs: Iterable[StateSpec], numel: int) -> int:
    """Bytes of the records of ``specs`` for ``numel`` elements."""
    return sum(round_up(spec.nbytes(numel)) for spec in specs)


def slot_shape(kinds: Iterable[Sequence[StateSpec]], grad_itemsize: int) -> SlotShape:
    """What slots must hold to serve regions with each of these sets of states."""
    sets = set(map(tuple, kinds))
    every = {spec for specs in sets for spec in specs}
    return SlotShape(
        state_itemsize=max((sum(s.dtype.itemsize / s.block_numel for s in k) for k in sets), default=0),
        grad_itemsize=grad_itemsize,
        num_states=max(map(len, sets), default=0),
        granule_numel=math.lcm(ALIGNMENT, *(spec.granule_numel for spec in every)),
    )
