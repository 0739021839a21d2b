"""`Init`: ordinary construction of models that do not fit memory.

[Note: construction] A model's constructors run as they are, with real values, so whatever initialises
parameters works, and in the order in which it always does: the model is the same to the bit. As soon as
a parameter is registered in a module its memory is moved to a file (`ParameterFiles`), the parameter
object stays, and so do ties. What came another way is moved when the module that holds it is registered
in its parent: a module that was converted (``.half()``), say. Copies of moved parameters, as
``copy.deepcopy`` makes them of a layer, are made in files at once. What is in ordinary memory at a time
is then what one constructor works on. torch's hooks for registrations are process-wide: other threads
that construct modules meanwhile take part.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from tiermem.config import TierConfig, load_config
from tiermem.errors import ConfigError
from tiermem.zero.parameter_files import ParameterFiles
from tiermem.zero.placeholder import Placeholder

logger = logging.getLogger(__name__)

Source = TierConfig | Mapping[str, Any] | str | Path


class Init(contextlib.ContextDecorator):
    """A context in which models are constructed whose parameters lie in files until `tiermem.shard`
    takes them, unit by unit. See [Note: construction]; names are those of DeepSpeed's ``zero.Init``.

    The files, without names, are in the ``paths`` of ``config`` (or ``config_dict_or_path``), else in
    the directory for temporary files; each rank constructs the model whole, and needs its bytes there.
    ``dtype`` is torch's default dtype inside; without it parameters keep the dtype that they are made
    in, and the configuration's ``compute_dtype`` counts when they are sharded, which keeps the masters
    exact. ``module``, if given, is moved at once. With ``enabled=False`` nothing happens at all. A
    tensor that shares memory with a parameter when that is registered does not after it.

    What chooses ranks, memory or quantisation in DeepSpeed has no meaning here, and the log says so
    once: ranks are chosen by ``tiermem.shard(..., mesh=...)``, everything else by the configuration.

    Raises `ConfigError`; constructors inside raise `TierIOError` where the files have no room.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Source | None = None,
        config: Source | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        zero_param_parallel_group: object = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: object = None,
        param_swapper: object = None,
    ) -> None:
        self._enabled = enabled
        self._open = contextlib.ExitStack()
        if not enabled:
            return
        _say_what_is_ignored(
            data_parallel_group=data_parallel_group,
            mem_efficient_linear=not mem_efficient_linear,
            remote_device=remote_device,
            pin_memory=pin_memory,
            mpu=mpu,
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            sequence_data_parallel_group=sequence_data_parallel_group,
            param_swapper=param_swapper,
        )
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype is {dtype}; parameters are made in a floating-point dtype")
        self._dtype = dtype
        self._files = ParameterFiles(_directories(config, config_dict_or_path))
        if module is not None:
            self._move(module.parameters())

    def __enter__(self) -> None:
        if not self._enabled:
            return
        with contextlib.ExitStack() as opened:
            opened.enter_context(_Copies(self._files))
            opened.enter_context(register_module_parameter_registration_hook(self._param_registered))
            opened.enter_context(register_module_module_registration_hook(self._module_registered))
            if self._dtype is not None:
                opened.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            self._open.push(opened.pop_all())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def _param_registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            self._move([param])

    def _module_registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._move(child.parameters())

    def _move(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            if isinstance(param, (Placeholder, nn.parameter.UninitializedParameter)):
                continue
            if self._files.wants(param):
                with torch.no_grad():
                    param.data = self._files.copy(param.detach())


class _Copies(TorchFunctionMode):
    """Copies of what lies in a file lie in a file too."""

    def __init__(self, files: ParameterFiles) -> None:
        super().__init__()
        self._files = files

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.clone and self._can_copy(args[0]):
            return self._files.copy(args[0])
        return func(*args, **(kwargs or {}))

    def _can_copy(self, tensor: torch.Tensor) -> bool:
        """Whether it is whole and autograd need not know of the copy."""
        recorded = tensor.requires_grad and torch.is_grad_enabled()
        if type(tensor) not in (torch.Tensor, nn.Parameter) or recorded:
            return False
        whole = tensor.layout is torch.strided and self._files.holds(tensor)
        return whole and tensor.untyped_storage().nbytes() == tensor.nbytes


def _directories(config: Source | None, config_dict_or_path: Source | None) -> tuple[Path, ...]:
    if config is not None and config_dict_or_path is not None:
        raise ConfigError("config and config_dict_or_path are the same; give one of them")
    source = config if config is not None else config_dict_or_path
    paths = () if source is None else load_config(source, silent=True).paths
    return paths or (Path(tempfile.gettempdir()),)


def _say_what_is_ignored(**arguments: object) -> None:
    given = [name for name, value in arguments.items() if value not in (None, False)]
    if given:
        logger.warning(
            "zero.Init: %s: no meaning here; tiermem.shard's mesh chooses ranks, the configuration "
            "everything else",
            ", ".join(given),
        )
