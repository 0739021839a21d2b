"""From what a user collected before sharding to what the model holds now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tiermem.errors import StateError

Parameters = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class Replacement:
    """Knows what stands for which parameter of a model once it is sharded; made before."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = model.named_parameters(remove_duplicate=False)
        self._names = {id(param): name for name, param in named}
        self._now: dict[str, nn.Parameter] = {}

    def check(self, parameters: Parameters) -> None:
        """Raises `StateError` for a tensor that is no parameter of the model."""
        for each in parameters:
            if isinstance(each, Mapping):
                self.check(_members(each["params"]))
            else:
                self._name(each[1] if isinstance(each, tuple) else each)

    def of(self, param: torch.Tensor) -> torch.Tensor:
        """The placeholder of ``param``, after sharding. Raises as `check`."""
        if not self._now:
            self._now = dict(self._model.named_parameters(remove_duplicate=False))
        return self._now[self._name(param)]

    def _name(self, param: torch.Tensor) -> str:
        name = self._names.get(id(param))
        if name is None:
            raise StateError(
                f"a {type(param).__name__} of shape {tuple(param.shape)} that the optimizer is to "
                f"update is not a parameter of the model. Remedy: give parameters of that model"
            )
        return name

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


def listed(parameters: Parameters) -> list[Any]:
    """``parameters`` with every iterator in it as a list, so that it can be gone through twice."""
    return [
        {**each, "params": list(_members(each["params"]))} if isinstance(each, Mapping) else each
        for each in parameters
    ]


def _members(params: Any) -> Iterable[Any]:
    return [params] if isinstance(params, torch.Tensor) else params
