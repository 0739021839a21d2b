"""`Span`: the bytes behind a numpy array, a torch tensor or any object with the buffer protocol.

numpy and torch are looked at only if the caller has imported them: whoever gives one of their
objects has.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from tiermem.io.buffers import AlignedBuffer

_DLPACK_CPU, _DLPACK_PINNED = 1, 3  # DLDeviceType: kDLCPU, kDLCUDAHost


@dataclass(frozen=True, slots=True)
class Span:
    """``nbytes`` at ``address``, valid as long as ``owner`` is alive."""

    address: int
    nbytes: int
    owner: object


def span_of(memory: Any, *, writable: bool) -> Span:
    """The bytes of ``memory``, without a copy.

    Raises TypeError for what has no bytes to give, and ValueError for memory that is not contiguous
    (C order), lies on an accelerator, holds Python objects or, with ``writable``, is read-only.
    """
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    if torch is not None and isinstance(memory, torch.Tensor):
        return _of_tensor(memory)
    if numpy is not None and isinstance(memory, numpy.ndarray):
        return _of_array(memory, writable)
    if isinstance(memory, AlignedBuffer):
        return Span(memory.address, memory.nbytes, memory.view)
    if hasattr(memory, "__dlpack_device__"):
        return _of_dlpack(memory, writable)
    if hasattr(memory, "__cuda_array_interface__"):
        raise _on_accelerator(memory, "a CUDA device")
    return _of_buffer(memory, writable)


def _name(memory: object) -> str:
    return f"{type(memory).__module__}.{type(memory).__qualname__}"


def _on_accelerator(memory: object, where: str) -> ValueError:
    return ValueError(
        f"{_name(memory)} lies on {where}; files are read into and written from host memory: "
        "give a (pinned) host tensor and copy"
    )


def _not_contiguous(memory: object, layout: str) -> ValueError:
    return ValueError(
        f"{_name(memory)} of {layout} is not contiguous (C order); give one that is, such as "
        "numpy.ascontiguousarray(array) or tensor.contiguous()"
    )


def _read_only(memory: object) -> ValueError:
    return ValueError(f"{_name(memory)} is read-only; a read needs memory that can be written")


def _of_tensor(tensor: Any) -> Span:
    if tensor.device.type != "cpu":
        raise _on_accelerator(tensor, f"device {tensor.device}")
    layout = f"shape {tuple(tensor.shape)}"
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"{_name(tensor)} has layout {tensor.layout}; give a dense tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a lazily conjugated or negated tensor; use resolve_conj() or resolve_neg()")
    if not tensor.is_contiguous():
        raise _not_contiguous(tensor, f"{layout} and strides {tensor.stride()}")
    return Span(int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size()), tensor)


def _of_array(array: Any, writable: bool) -> Span:
    if array.dtype.hasobject:
        raise ValueError(f"an array of dtype {array.dtype} holds Python objects, not their bytes")
    if not array.flags.c_contiguous:
        raise _not_contiguous(array, f"shape {array.shape} and strides {array.strides}")
    if writable and not array.flags.writeable:
        raise _read_only(array)
    return Span(int(array.ctypes.data), int(array.nbytes), array)


def _of_dlpack(memory: Any, writable: bool) -> Span:
    kind = int(memory.__dlpack_device__()[0])
    if kind not in (_DLPACK_CPU, _DLPACK_PINNED):
        raise _on_accelerator(memory, f"a device (DLPack type {kind})")
    import numpy

    return _of_array(numpy.from_dlpack(memory), writable)


def _of_buffer(memory: Any, writable: bool) -> Span:
    try:
        view = memoryview(memory)
    except TypeError:
        raise TypeError(
            f"{_name(memory)} has no bytes to transfer; give a numpy array, a torch tensor, or an "
            "object with the buffer protocol or DLPack"
        ) from None
    if "O" in view.format:
        raise ValueError(f"{_name(memory)} holds Python objects, not their bytes")
    if not view.c_contiguous:
        raise _not_contiguous(memory, f"shape {view.shape} and strides {view.strides}")
    if writable and view.readonly:
        raise _read_only(memory)
    import _cffi_backend  # has the one function that gives the address of read-only memory, too

    ffi = _cffi_backend.FFI()
    held = ffi.from_buffer(view)  # holds the export: a bytearray cannot be resized meanwhile
    return Span(int(ffi.cast("uintptr_t", held)), view.nbytes, held)
