"""What of an optimizer's states users see under ``optimizer.state[param]``, and may give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tiermem.zero.group import Region
from tiermem.zero.group_gradient import flatten_like
from tiermem.zero.param import ShardedParam
from tiermem.zero.runtime import Runtime


class StateView(Protocol):
    """One key of a parameter's state: a tensor of the parameter's shape."""

    @property
    def key(self) -> str: ...

    def read(self, runtime: Runtime, region: Region, param: ShardedParam) -> torch.Tensor:
        """A new tensor. Over several ranks all of them call it."""

    def write(
        self, runtime: Runtime, region: Region, param: ShardedParam, value: torch.Tensor | None
    ) -> None:
        """Sets it; None: to zeros, as before the first update."""


@dataclass(frozen=True, slots=True)
class PlainView:
    """A state that is shown as it is kept."""

    key: str

    def read(self, runtime: Runtime, region: Region, param: ShardedParam) -> torch.Tensor:
        return runtime.states.read(region, self.key, param)

    def write(
        self, runtime: Runtime, region: Region, param: ShardedParam, value: torch.Tensor | None
    ) -> None:
        if value is not None:
            flat = memory_order(value, param, region.states[self.key].dtype)
            runtime.states.write(region, self.key, param, flat)
        elif self.key in region.initialised:
            runtime.states.edit(region, self.key, param, lambda part: part.zero_())


def memory_order(value: torch.Tensor, param: ShardedParam, dtype: torch.dtype) -> torch.Tensor:
    """The elements of ``value``, a tensor of the parameter's shape, that belong to this rank's part, as
    they lie in memory."""
    part = param.part_of(value.detach()).to(device="cpu", dtype=dtype)
    return flatten_like(part, param.spec.stride)
