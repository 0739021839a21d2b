"""Every torch name used here that is private or only half public, each behind one function.

A test exercises each of them, so that a torch release that changes one is found by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only


def current_graph_task_id() -> int:
    """The id of the backward that runs in this thread, -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the current graph task has finished without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def top_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost active (pack, unpack) pair, if any."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks if hooks else None


def is_checkpoint_hook(pack: Callable[..., Any]) -> bool:
    """Whether ``pack`` belongs to torch.utils.checkpoint (which recomputes instead of saving)."""
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def make_wrapper(
    cls: type,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Any:
    """A tensor of subclass ``cls`` with this metadata and no storage."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors over one storage, on the meta device too, where all addresses are 0."""
    return int(tensor.untyped_storage()._cdata)


def disable_torch_function() -> Any:
    """A context in which subclasses are treated as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def set_autocast_cache(enabled: bool) -> bool:
    """Switches autocast's cache of cast weights; returns what it was."""
    previous = bool(torch.is_autocast_cache_enabled())
    torch.set_autocast_cache_enabled(enabled)
    return previous


def inside_distributed_data_parallel() -> bool:
    """Whether a DistributedDataParallel module is in its forward."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None:
        return False
    return module.DistributedDataParallel._get_active_ddp_module() is not None


_STATE_HOOKS = {
    "before save": "_optimizer_state_dict_pre_hooks",
    "after save": "_optimizer_state_dict_post_hooks",
    "before load": "_optimizer_load_state_dict_pre_hooks",
    "after load": "_optimizer_load_state_dict_post_hooks",
}


def state_dict_hooks(optimizer: torch.optim.Optimizer, when: str) -> list[Callable[..., Any]]:
    """What ``register_state_dict_pre_hook`` and its like were given, in the order to call them.
    ``when``: ``before save``, ``after save``, ``before load`` or ``after load``."""
    return list(getattr(optimizer, _STATE_HOOKS[when]).values())


def step_hooks(optimizer: torch.optim.Optimizer, when: str) -> list[Callable[..., Any]]:
    """What ``register_step_pre_hook`` (``when``: ``before``) and ``register_step_post_hook``
    (``after``) were given, in the order to call them."""
    hooks = {"before": "_optimizer_step_pre_hooks", "after": "_optimizer_step_post_hooks"}
    return list(getattr(optimizer, hooks[when]).values())


def caller_frame(depth: int = 2) -> FrameType:
    """The Python frame ``depth`` levels up."""
    return sys._getframe(depth)


def is_executing(frame: FrameType | None) -> bool:
    """Whether ``frame`` is among the callers of the present call."""
    current: FrameType | None = sys._getframe(1)
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False


def running_frames() -> set[int]:
    """The ids of the frames that execute now, in any thread."""
    ids = set()
    frames: list[FrameType | None] = list(sys._current_frames().values())
    while frames:  # emptied: a frame that refers to itself would be garbage that holds its callers
        frame = frames.pop()
        if frame is not None:
            ids.add(id(frame))
            frames.append(frame.f_back)
            del frame
    return ids


def inside_forward_mode() -> bool:
    """Whether a forward-mode transform (``torch.func.jvp``, ``jacfwd``) is running."""
    return (
        torch.autograd.forward_ad._current_level >= 0
        and torch._C._functorch.peek_interpreter_stack() is not None
    )


_CALLERS = {
    ("_apply", "nn/modules/module.py"): "Module._apply",
    ("__new__", "nn/parameter.py"): "nn.Parameter",
    ("__init__", "nn/parallel/distributed.py"): "DistributedDataParallel",
}


def special_caller() -> str | None:
    """Which code of torch's, that means to take parameters over, is among the nearest callers:
    ``Module._apply`` (``to``, ``half``, ``cuda``, ``to_empty``), ``nn.Parameter``, or
    ``DistributedDataParallel``."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(14):
        if frame is None:
            return None
        for (name, file), caller in _CALLERS.items():
            if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file):
                return caller
        frame = frame.f_back
    return None


def asked_by_torch_optimizer() -> bool:
    """Whether one of torch's optimizers is collecting parameters and gradients for its step, which
    is before it changes anything: ``_init_group`` in torch/optim asks gradients ``is_sparse``."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_name == "_init_group" and "/torch/optim/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def backward_retains_graph() -> bool:
    """Whether the innermost running backward was called with ``retain_graph``: the third
    positional argument of ``torch.autograd.graph._engine_run_backward``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            positional = frame.f_locals.get("args", ())
            return bool(len(positional) > 1 and positional[1])
        frame = frame.f_back
    return False


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. Imports nothing: without the import there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank has: the object itself, not a view; any other tensor as it
    is."""
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def adopt_local_tensor(param: torch.Tensor, other: torch.Tensor) -> None:
    """Makes the DTensor ``param`` a wrapper of the same part as the DTensor ``other``, from which torch
    has set its metadata."""
    param._local_tensor = other._local_tensor  # type: ignore[attr-defined]
    param._spec = other._spec  # type: ignore[attr-defined]


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """What a functional collective makes, when it is made; any other tensor as it is."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    if module is None or not isinstance(tensor, module.AsyncCollectiveTensor):
        return tensor
    return tensor.wait()  # type: ignore[no-any-return]
