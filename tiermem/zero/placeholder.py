"""What stands in a module's slot while the parameter is sharded, and for gradients that left.

[Note: placeholders] A `Placeholder` has the true shape, dtype and device but no storage. Torch
functions on it gather the parameter first, so any use outside its module is right, only slower.
Names that touch metadata only are answered here; those that mean something for the real parameter
(``grad``, ``requires_grad``, hooks) are forwarded to it. The real `nn.Parameter` persists
underneath for the life of the model: modules that keep references of their own (LSTM,
MultiheadAttention, parametrizations) and autograd's accumulators stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from tiermem.errors import StateError
from tiermem.zero import compat
from tiermem.zero.layout import ParamSpec
from tiermem.zero.split import Split


class ParamHandle(Protocol):
    """What a placeholder knows of its parameter; `tiermem.zero.param.ShardedParam`."""

    name: str
    real: nn.Parameter

    @property
    def spec(self) -> ParamSpec: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def stride(self) -> tuple[int, ...]: ...

    @property
    def split(self) -> Split | None: ...

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, params: Iterable[Any]) -> Any:
        """Runs ``function`` with the groups of all ``params`` gathered."""

    def get_grad(self) -> torch.Tensor | None: ...

    def set_grad(self, value: torch.Tensor | None) -> None: ...

    def get_data(self) -> torch.Tensor: ...

    def set_data(self, value: torch.Tensor) -> None: ...

    def set_requires_grad(self, value: bool) -> None: ...

    def add_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any: ...


_METADATA = frozenset(
    (
        "dim",
        "ndimension",
        "size",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "is_inference",
        "is_shared",
        "has_names",
        "storage_offset",
        "__hash__",
        "__len__",
    )
)
_METADATA_PROPERTIES = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "itemsize",
        "nbytes",
        "names",
        "output_nr",
        "is_leaf",
        "requires_grad",
        "grad_fn",
        "grad_dtype",
        "retains_grad",
        "_version",
        "is_cuda",
        "is_cpu",
        "is_xpu",
        "is_mps",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_mkldnn",
        "is_nested",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    )
)
_REFUSED = {
    "share_memory_": "share the model before tiermem.shard, or open one runtime per process",
    "set_": "register parametrizations and swap storages before tiermem.shard",
    "untyped_storage": "use it inside tiermem.gathered(params)",
    "storage": "use it inside tiermem.gathered(params)",
    "data_ptr": "use it inside tiermem.gathered(params)",
    "__deepcopy__": "copy the model before tiermem.shard, or build it twice from the meta device",
    "__reduce_ex__": "save model.state_dict() instead of pickling the module",
    "swap_tensors": "swap parameters before tiermem.shard",
}
_TAKE_OVER = {
    "Module._apply": "convert the model before tiermem.shard, or set compute_dtype and device in the "
    "configuration",
    "nn.Parameter": "register parametrizations before tiermem.shard",
    "DistributedDataParallel": "use the sharded model itself; tiermem reduces gradients over its own "
    "process group",
}
_COMPATIBLE = "_has_compatible_shallow_copy_type"  # asked by Module._apply
_CASTS = frozenset(["to", "cpu", "cuda", "xpu", "half", "float", "double", "bfloat16", "type"])


def _property_name(function: Any) -> str | None:
    """'grad' for ``Tensor.grad.__get__`` and ``Tensor.grad.__set__``."""
    owner = getattr(function, "__self__", None)
    return getattr(owner, "__name__", None)


class Placeholder(nn.Parameter):
    """See [Note: placeholders]."""

    _handle: ParamHandle

    @staticmethod
    def __new__(cls, handle: ParamHandle) -> Placeholder:
        real = handle.real
        tensor: Placeholder = compat.make_wrapper(
            cls, handle.shape, handle.stride, handle.spec.dtype, real.device, real.requires_grad
        )
        tensor._handle = handle
        return tensor

    def __init__(self, handle: ParamHandle) -> None:
        """Everything is done in ``__new__``."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with compat.disable_torch_function():
            return (
                f"Placeholder({self._handle.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
                f"requires_grad={self.requires_grad})"
            )

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal(self, "copy.deepcopy", _REFUSED["__deepcopy__"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, "pickling", _REFUSED["__reduce_ex__"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # reached only where torch bypasses __torch_function__
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, Placeholder):
                raise _refusal(value, str(func), "use it inside tiermem.gathered(params)")
        raise StateError(f"{func} reached a sharded parameter; use it inside tiermem.gathered(params)")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return _access(func, name, args)
        self = args[0] if args and isinstance(args[0], Placeholder) else None
        if self is not None:
            answer = _method(self, name, func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        return _gathered_call(func, args, kwargs)


class SplitPlaceholder(Placeholder):
    """That of a DTensor, with what a DTensor has beyond a tensor; see [Note: split parameters]."""

    @property
    def device_mesh(self) -> Any:
        return self._split.mesh

    @property
    def placements(self) -> Any:
        return self._split.placements

    @property
    def _split(self) -> Split:
        split = self._handle.split
        assert split is not None
        return split

    def to_local(self, **options: Any) -> Any:
        return self._call("to_local", options)

    def full_tensor(self, **options: Any) -> Any:
        return self._call("full_tensor", options)

    def redistribute(self, *args: Any, **options: Any) -> Any:
        return self._call("redistribute", options, *args)

    def _call(self, method: str, options: dict[str, Any], *args: Any) -> Any:
        return _gathered_call(getattr(type(self._handle.real), method), (self, *args), options)


def _access(func: Any, kind: str, args: Any) -> Any:
    """Attribute access on a placeholder."""
    self, attribute = args[0], _property_name(func)
    if not isinstance(self, Placeholder):
        return _gathered_call(func, args, {})
    handle = self._handle
    if attribute == "grad":
        if kind == "__get__":
            return handle.get_grad()
        handle.set_grad(None if kind == "__delete__" else args[1])
        return None
    if attribute == "data":
        if kind == "__get__":
            return handle.get_data()
        if args[1] is self:  # Module._apply with a cast that changes nothing
            return None
        handle.set_data(args[1])
        return None
    if attribute == "requires_grad" and kind == "__set__":
        handle.set_requires_grad(bool(args[1]))
    if attribute == "_version" and kind == "__get__":
        return handle.real._version
    if attribute in _METADATA_PROPERTIES:
        with compat.disable_torch_function():
            return func(*args)
    return _gathered_call(func, args, {})


def _method(self: Placeholder, name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Methods that need no data, or that cannot be had; NotImplemented for all others."""
    handle = self._handle
    if name in _METADATA:
        with compat.disable_torch_function():
            return func(*args, **kwargs)
    if name == _COMPATIBLE:
        return args[0] is args[1]
    if name == "is_same_size":
        return _sizes_only(func, args, kwargs)
    if name == "is_pinned":  # no memory, so none that is locked
        return False
    if name == "is_set_to":
        other = args[1] if len(args) > 1 else kwargs.get("tensor")
        return self is other if isinstance(other, Placeholder) else NotImplemented
    if name == "requires_grad_":
        handle.set_requires_grad(bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True)))
        return self
    if name == "register_hook":
        return handle.real.register_hook(*args[1:], **kwargs)
    if name == "register_post_accumulate_grad_hook":
        return handle.add_grad_hook(*args[1:], **kwargs)
    if name in _CASTS:
        return _cast(self, func, args, kwargs)
    if name in _REFUSED:
        raise _refusal(self, name, _REFUSED[name])
    return NotImplemented


def _sizes_only(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` on tensors of the same sizes that have no data."""
    with compat.disable_torch_function():
        sizes = compat.tree_map_only(
            torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
        )
        return func(*sizes[0], **sizes[1])


def _cast(self: torch.Tensor, func: Any, args: Any, kwargs: Any) -> Any:
    """A cast that changes nothing gives the tensor itself; ``type()`` gives a name."""
    with compat.disable_torch_function():
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        target = func(probe, *args[1:], **kwargs)
        if isinstance(target, str):
            return target
        same = target.dtype == self.dtype and target.device == self.device and not kwargs.get("copy")
    if same:
        return self
    return NotImplemented


def _gathered_call(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` with every placeholder's parameter gathered and put in its place."""
    leaves = compat.tree_leaves((args, kwargs))
    found = [leaf for leaf in leaves if isinstance(leaf, Placeholder)]
    if any(isinstance(leaf, GradientStandIn) for leaf in leaves):  # before anything is gathered
        raise _gradient_refusal(getattr(func, "__name__", ""), args)
    if not found:
        with compat.disable_torch_function():
            return func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name in _REFUSED:
        raise _refusal(found[0], name, _REFUSED[name])
    caller = compat.special_caller()
    if caller is not None:
        raise _refusal(found[0], f"{name} by {caller}", _TAKE_OVER[caller])
    handle = found[0]._handle
    real_args, real_kwargs = compat.tree_map_only(Placeholder, lambda p: p._handle.real, (args, kwargs))
    by_real = {id(p._handle.real): p for p in found}
    result = handle.call(func, real_args, real_kwargs, [p._handle for p in found])
    if isinstance(result, torch.Tensor):  # in-place functions return the parameter itself
        return by_real.get(id(result), result)
    return result


def _refusal(self: Placeholder, what: str, remedy: str) -> StateError:
    return StateError(
        f"{what} on {self._handle.name!r} is not possible: the parameter is sharded. Remedy: {remedy}"
    )


_DISCARDING = frozenset(["zero_", "detach_", "requires_grad_"])


class GradientStandIn(torch.Tensor):
    """Stands for a gradient that has left for its tier: true metadata, no values.

    Reading values raises with the remedies, so that torch's ``clip_grad_norm_``, optimizers and
    ``GradScaler`` cannot silently see nothing. ``zero_()`` means what it means in
    ``zero_grad(set_to_none=False)``: discard.
    """

    _name: str
    _of: ParamHandle

    @staticmethod
    def __new__(cls, handle: ParamHandle) -> GradientStandIn:
        tensor: GradientStandIn = compat.make_wrapper(
            cls, handle.shape, handle.stride, handle.spec.dtype, handle.real.device, False
        )
        tensor._name = handle.name
        tensor._of = handle
        return tensor

    def stands_for(self, handle: ParamHandle) -> bool:
        """Whether it is the gradient of that parameter."""
        return self._of is handle

    def __init__(self, *_: Any) -> None:
        """Everything is done in ``__new__``."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GradientStandIn({self._name!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _gradient_refusal(str(func), args)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self = args[0] if args and isinstance(args[0], GradientStandIn) else None
        if self is not None:
            if name == _COMPATIBLE:
                return args[0] is args[1]
            if name in _DISCARDING:
                if name == "zero_":
                    self._of.set_grad(None)
                return self
            if name == "__set__" and _property_name(func) == "data" and _is_same(self, args[1]):
                return None
            metadata = name in _METADATA or (
                name == "__get__" and _property_name(func) in (_METADATA_PROPERTIES | {"grad"})
            )
            if name == "is_same_size":
                return _sizes_only(func, args, kwargs)
            if name in _CASTS:
                target = _cast(self, func, args, kwargs)
                if target is not NotImplemented:
                    return target
            if metadata:
                # torch's AdamW decays the weights before it touches a gradient: refuse it sooner.
                if _property_name(func) == "is_sparse" and compat.asked_by_torch_optimizer():
                    raise _gradient_refusal("a step of torch's optimizer", args)
                with compat.disable_torch_function():
                    return func(*args, **kwargs)
        raise _gradient_refusal(name, args)


def _is_same(self: GradientStandIn, other: object) -> bool:
    """Stand-ins are made at each access to ``.grad``."""
    return isinstance(other, GradientStandIn) and other._of is self._of


def _gradient_refusal(what: str, args: Any) -> StateError:
    names = [leaf._name for leaf in compat.tree_leaves(args) if isinstance(leaf, GradientStandIn)]
    return StateError(
        f"{what} needs the gradient of {', '.join(map(repr, names[:3])) or 'a sharded parameter'}"
        f"{' and others' if len(names) > 3 else ''}, which has left for its tier. Remedy: to "
        f"update, opt = tiermem.optim.AdamW(...), not torch's optimizers; to scale losses, "
        f"opt.scale(loss), not GradScaler; to clip, opt.clip_grad_norm_(max_norm); to look at one, "
        f"tiermem.full_grad(param) gives a copy"
    )
