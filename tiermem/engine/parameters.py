"""From what a user collected before sharding to what the model holds now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tiermem.errors import StateError
from tiermem.zero.param import ShardedParam
from tiermem.zero.placeholder import Placeholder

Parameters = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class Replacement:
    """Knows, of a sharded model, which placeholder stands for which of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._placeholders: dict[int, torch.Tensor] = {}
        for param in model.parameters():
            if isinstance(param, Placeholder) and isinstance(param._handle, ShardedParam):
                self._placeholders[id(param._handle.real)] = param

    def of(self, param: torch.Tensor) -> torch.Tensor:
        """The placeholder of ``param``, or ``param`` if it is one. Raises `StateError` for a tensor
        that is no parameter of the model."""
        if isinstance(param, Placeholder):
            return param
        found = self._placeholders.get(id(param))
        if found is None:
            raise StateError(
                f"a {type(param).__name__} of shape {tuple(param.shape)} that the optimizer is to "
                f"update is not a parameter of the model. Remedy: give parameters of that model"
            )
        return found

    def of_all(self, parameters: Parameters) -> list[Any]:
        """The same for tensors, named tensors or parameter groups, in torch's ways of giving them."""
        result: list[Any] = []
        for each in parameters:
            if isinstance(each, Mapping):
                result.append({**each, "params": self.of_all(_members(each["params"]))})
            elif isinstance(each, tuple):
                result.append((each[0], self.of(each[1])))
            else:
                result.append(self.of(each))
        return result


def _members(params: Any) -> Iterable[Any]:
    return [params] if isinstance(params, torch.Tensor) else params
