"""Hooks that turn silent misuse of a sharded model into an error with a remedy.

[Note: replaced parameters] What somebody puts in the place of a sharded module or parameter, such as a
larger embedding, is left alone, since `torch.func.functional_call` does the same for a moment. But the
runtime does not know its parameters: its optimizers would not train them, nothing would average them
over ranks, and nobody would say so. So the end of a backward that has given one a gradient raises. A
module that has only gone is no matter: layers may be dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from tiermem.errors import StateError
from tiermem.types import format_bytes
from tiermem.zero import compat
from tiermem.zero.group import ParamGroup
from tiermem.zero.placeholder import Placeholder


def install_guards(model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """``load_state_dict(assign=True)`` raises; ``state_dict()`` copies group by group."""
    owners = {slot.module for group in groups for param in group.params for slot in param.slots}
    for module in owners:
        module.register_load_state_dict_pre_hook(_refuse_assign)
        module.register_state_dict_post_hook(_Copier(groups))
    total = sum(group.nbytes for group in groups)
    model.register_state_dict_pre_hook(_SizeCheck(total))
    if groups:
        groups[0].runtime.backward.checks.append(_ReplacementCheck(model, groups))


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


class _ReplacementCheck:
    """See [Note: replaced parameters]."""

    def __init__(self, model: nn.Module, groups: Sequence[ParamGroup]) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._model = weakref.ref(model)
        self._known = weakref.WeakSet(names)
        self._slots = [
            (param, slot, names[slot.module])
            for group in groups
            for param in group.params
            for slot in param.slots
        ]

    def __call__(self) -> None:
        """Raises `StateError` for a parameter in the place of a sharded one that has a gradient."""
        model = self._model()
        if model is None:
            return
        for module, path, name in self._foreign(model):
            value = module._parameters.get(name)
            if value is None or isinstance(value, Placeholder) or not value.is_leaf:
                continue
            if value.grad is None:
                continue
            raise StateError(
                f"{f'{path}.{name}'.lstrip('.')!r} was sharded, and another parameter of shape "
                f"{tuple(value.shape)} is in its place now, which nobody would train or average over "
                f"ranks. Remedy: put it there before tiermem.shard(){self._to_shard(model, path)}; if "
                f"it is not to be trained, requires_grad_(False)"
            )

    def _to_shard(self, model: nn.Module, path: str) -> str:
        """What to do about the module that has come; nothing for one that was there before."""
        for prefix in itertools.accumulate(path.split("."), lambda a, b: f"{a}.{b}"):
            if model.get_submodule(prefix) not in self._known:
                return (
                    f", or model.zero_grad() and new = model.get_submodule({prefix!r}), which is "
                    f"sharded too, tiermem.shard(new, runtime), and given to the optimizer, "
                    f"add_param_group({{'params': new.parameters()}})"
                )
        return ""

    def _foreign(self, model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
        """Modules with their path and the name of a parameter that is not the sharded one."""
        present = set(model.modules())
        for param, slot, path in self._slots:
            if slot.module not in present:
                with contextlib.suppress(AttributeError):  # it has only gone
                    yield model.get_submodule(path), path, slot.name
                continue
            value = slot.module._parameters.get(slot.name)
            if value is not param.placeholder and value is not param.real:
                yield slot.module, path, slot.name
