"""Hooks that turn silent misuse of a sharded model into an error with a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import nn

from tiermem.errors import StateError
from tiermem.types import format_bytes
from tiermem.zero import compat
from tiermem.zero.group import ParamGroup


def install_guards(model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """``load_state_dict(assign=True)`` raises; ``state_dict()`` copies group by group."""
    owners = {slot.module for group in groups for param in group.params for slot in param.slots}
    for module in owners:
        module.register_load_state_dict_pre_hook(_refuse_assign)
        module.register_state_dict_post_hook(_Copier(groups))
    total = sum(group.nbytes for group in groups)
    model.register_state_dict_pre_hook(_SizeCheck(total))


def _refuse_assign(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if local_metadata.get("assign_to_params_buffers", False):
        raise StateError(
            f"load_state_dict(assign=True) would replace sharded parameters of "
            f"{prefix or 'the model'!r} by tensors that the runtime does not know. Remedy: "
            f"load_state_dict(state) without assign, which copies group by group"
        )


class _Copier:
    """Copies what lies in a lease, so that a sweep gives groups back as it goes. The copies are
    the caller's memory, outside of the budgets."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._gather = groups[0].runtime.gather

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        for name in module._parameters:
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                address = compat.local_tensor(value).untyped_storage().data_ptr()
                if address in self._gather.by_address:
                    state_dict[prefix + name] = value.clone()


class _SizeCheck:
    """Refuses a ``state_dict()`` that would not fit in memory."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        available = psutil.virtual_memory().available
        if self._nbytes > available:
            raise StateError(
                f"state_dict() would copy {format_bytes(self._nbytes)} of parameters into memory; "
                f"{format_bytes(available)} are available. Remedy: go through the modules with "
                f"tiermem.gathered(module.parameters()) and save each by itself"
            )
