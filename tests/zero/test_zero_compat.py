"""Each private torch name that is used does what the code relies on."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiermem.zero import compat


def test_current_graph_task_id() -> None:
    assert compat.current_graph_task_id() == -1
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(compat.current_graph_task_id()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen[0] != -1
    assert seen[0] != seen[1]
    assert compat.current_graph_task_id() == -1


def test_queue_end_of_backward() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        compat.queue_end_of_backward(lambda: order.append("end"))
        order.append("hook")

    y.register_hook(hook)
    x.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
    y.sum().backward()
    assert order == ["hook", "accumulated", "end"]


def test_top_saved_tensor_hooks() -> None:
    assert compat.top_saved_tensor_hooks() is None

    def pack(t: torch.Tensor) -> torch.Tensor:
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert compat.top_saved_tensor_hooks() == (pack, pack)
        with torch.autograd.graph.save_on_cpu():
            assert compat.top_saved_tensor_hooks()[0] is not pack
        assert compat.top_saved_tensor_hooks()[0] is pack
    assert compat.top_saved_tensor_hooks() is None


def test_is_checkpoint_hook() -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.is_checkpoint_hook(compat.top_saved_tensor_hooks()[0]))
        return x.sin()

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [True, True]  # the forward and its recompute
    with torch.autograd.graph.save_on_cpu():
        assert not compat.is_checkpoint_hook(compat.top_saved_tensor_hooks()[0])


def test_make_wrapper() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    shape = torch.Size((4, 3))
    made = compat.make_wrapper(Wrapper, shape, (1, 4), torch.bfloat16, torch.device("cpu"), True)
    assert type(made) is Wrapper
    assert made.shape == shape
    assert made.stride() == (1, 4)
    assert made.dtype == torch.bfloat16
    assert made.requires_grad
    assert made.is_leaf


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_key(device: str) -> None:
    a, b = (torch.ones(8, device=device) for _ in range(2))
    assert compat.storage_key(a) == compat.storage_key(a[4:])
    assert compat.storage_key(a) == compat.storage_key(nn.Parameter(a.data))
    assert compat.storage_key(a) != compat.storage_key(b)


def test_disable_torch_function() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    loud = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError):
        loud.sum()
    with compat.disable_torch_function():
        assert loud.shape == (2,)
        assert loud.sum() == 2


def test_set_autocast_cache() -> None:
    before = torch.is_autocast_cache_enabled()
    assert compat.set_autocast_cache(False) == before
    assert not torch.is_autocast_cache_enabled()
    assert compat.set_autocast_cache(before) is False
    assert torch.is_autocast_cache_enabled() == before


def test_inside_distributed_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat.inside_distributed_data_parallel()
    from torch.nn.parallel import DistributedDataParallel

    assert DistributedDataParallel._get_active_ddp_module() is None
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", object())
    assert compat.inside_distributed_data_parallel()


def test_state_dict_hooks() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    register = {
        "before save": optimizer.register_state_dict_pre_hook,
        "after save": optimizer.register_state_dict_post_hook,
        "before load": optimizer.register_load_state_dict_pre_hook,
        "after load": optimizer.register_load_state_dict_post_hook,
    }
    for when, function in register.items():
        assert compat.state_dict_hooks(optimizer, when) == []
        first, second = (lambda *_: None), (lambda *_: None)
        handle = function(second)
        function(first, prepend=True)
        assert compat.state_dict_hooks(optimizer, when) == [first, second]
        handle.remove()
        assert compat.state_dict_hooks(optimizer, when) == [first]


def test_step_hooks() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    for when in ("before", "after"):
        assert compat.step_hooks(optimizer, when) == []
    before, after = (lambda *_: None), (lambda *_: None)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    assert compat.step_hooks(optimizer, "before") == [before]
    assert compat.step_hooks(optimizer, "after") == [after]


def test_caller_frame() -> None:
    def inner():
        return compat.caller_frame(1), compat.caller_frame(2)

    own, outer = inner()
    assert own.f_code.co_name == "inner"
    assert outer is sys._getframe()


def test_is_executing() -> None:
    def finished():
        return sys._getframe()

    assert compat.is_executing(sys._getframe())
    assert not compat.is_executing(finished())
    assert not compat.is_executing(None)


class _Asking(torch.Tensor):
    """Notes who calls torch functions on it."""

    seen: list[str | None]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(compat.special_caller())
        return super().__torch_function__(func, types, args, kwargs or {})


def test_special_caller() -> None:
    _Asking.seen = []
    asking = torch.ones(2).as_subclass(_Asking)
    asking.sum()
    assert set(_Asking.seen) == {None}
    module = nn.Linear(2, 2)
    module.register_buffer("asking", asking)
    for convert in (lambda: module.to(torch.float64), lambda: module.to_empty(device="cpu")):
        _Asking.seen = []
        convert()
        assert "Module._apply" in _Asking.seen
    _Asking.seen = []
    nn.Parameter(torch.ones(2).as_subclass(_Asking))
    assert "nn.Parameter" in _Asking.seen
    assert compat.special_caller() is None


@pytest.mark.usefixtures("process_group")
def test_special_caller_of_data_parallel() -> None:
    _Asking.seen = []
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2).as_subclass(_Asking))
    _Asking.seen = []
    torch.nn.parallel.DistributedDataParallel(module)
    assert "DistributedDataParallel" in _Asking.seen


class _Sparse(torch.Tensor):
    """Notes who asks whether it is sparse."""

    seen: list[bool]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__self__", None) is torch.Tensor.is_sparse:
            cls.seen.append(compat.asked_by_torch_optimizer())
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam"])
def test_asked_by_torch_optimizer(kind: str) -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2).as_subclass(_Sparse)
    _Sparse.seen = []
    assert not param.grad.is_sparse
    assert _Sparse.seen == [False]
    _Sparse.seen = []
    getattr(torch.optim, kind)([param], lr=0.1).step()
    assert _Sparse.seen[0] is True
    assert not compat.asked_by_torch_optimizer()


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("way", ["backward", "autograd.backward", "autograd.grad"])
def test_backward_retains_graph(retain: bool, way: str) -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(compat.backward_retains_graph()))
    if way == "backward":
        y.sum().backward(retain_graph=retain)
    elif way == "autograd.backward":
        torch.autograd.backward([y.sum()], retain_graph=retain)
    else:
        torch.autograd.grad(y.sum(), x, retain_graph=retain)
    assert seen == [retain]
    assert not compat.backward_retains_graph()


def test_backward_retains_graph_by_default_of_create_graph() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * x
    y.register_hook(lambda grad: seen.append(compat.backward_retains_graph()))
    torch.autograd.grad(y.sum(), x, create_graph=True)
    assert seen == [True]


def test_module_call_frames_are_named_as_expected() -> None:
    """Hooks find the frame of their module's call by this name."""
    names: list[str] = []

    def hook(module: nn.Module, args: object) -> None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "_call_impl":
            frame = frame.f_back
        names.append(frame.f_code.co_filename if frame is not None else "")

    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(hook)
    module(torch.ones(1, 2))
    assert names[0].endswith("module.py")


def test_every_function_has_a_test() -> None:
    functions = {
        name
        for name, value in vars(compat).items()
        if callable(value) and getattr(value, "__module__", "") == compat.__name__
    }
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert functions <= tests


def test_inside_forward_mode() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.inside_forward_mode())
        return x * 2

    x = torch.ones(2)
    look(x)
    torch.func.vmap(look)(x)
    torch.func.vjp(look, x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.vmap(lambda y: torch.func.jvp(look, (y,), (y,)))(x)
    assert seen == [False, False, False, True, True]


def test_running_frames() -> None:
    import threading

    inside, leave = threading.Event(), threading.Event()
    frames = []

    def run() -> None:
        frames.append(sys._getframe())
        inside.set()
        leave.wait()

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    assert {id(frames[0]), id(sys._getframe())} <= compat.running_frames()
    leave.set()
    thread.join()
    assert id(frames[0]) not in compat.running_frames()


def test_trees_of_arguments() -> None:
    tree = {"a": [1, (2.0, "three")], "b": None}
    assert compat.tree_leaves(tree) == [1, 2.0, "three", None]
    assert compat.tree_map_only(float, lambda x: x + 1, tree) == {"a": [1, (3.0, "three")], "b": None}


def test_is_distributed(process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    tensor = torch.ones(3)
    made = DTensor.from_local(tensor, init_device_mesh("cpu", (1,)), [Replicate()])
    assert compat.is_distributed(made)
    assert not compat.is_distributed(tensor)


def distributed(tensor: torch.Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, init_device_mesh("cpu", (1,)), [Replicate()])


def test_local_tensor(process_group: None) -> None:
    tensor = torch.ones(3)
    made = distributed(tensor)
    assert compat.local_tensor(made).data_ptr() == tensor.data_ptr()
    assert compat.local_tensor(made) is compat.local_tensor(made)  # no view
    assert compat.local_tensor(tensor) is tensor


def test_adopt_local_tensor(process_group: None) -> None:
    made, other = distributed(torch.ones(3)), distributed(torch.zeros(3, dtype=torch.bfloat16))
    made.data = other
    compat.adopt_local_tensor(made, other)
    assert made.dtype == torch.bfloat16
    assert compat.local_tensor(made) is compat.local_tensor(other)
    assert torch.equal(made.full_tensor(), torch.zeros(3, dtype=torch.bfloat16))


def test_finished(process_group: None) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    made = all_reduce(torch.full((3,), 2.0), "sum", torch.distributed.group.WORLD)
    assert isinstance(made, AsyncCollectiveTensor)
    finished = compat.finished(made)
    assert type(finished) is torch.Tensor
    assert torch.equal(finished, torch.full((3,), 2.0))
    assert compat.finished(finished) is finished
