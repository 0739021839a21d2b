"""The arithmetic of a step: Adam, AdamW and SGD on masters of every form, sums of gradients with
their norm.

Native kernels where the core was built, torch operations with the same results otherwise.
"""

from __future__ import annotations

import os

from tiermem.errors import ConfigError
from tiermem.kernels.base import AdamWStep, Kernels, Moments8bit, SGDStep

__all__ = ["AdamWStep", "Kernels", "Moments8bit", "SGDStep", "available_kernels", "open_kernels"]


def available_kernels() -> tuple[str, ...]:
    """Names that :func:`open_kernels` accepts on this machine, best first; the last is ``torch``."""
    try:
        from tiermem.kernels import native
    except ImportError:
        return ("torch",)
    return (*native.available_isas(), "torch")


def open_kernels(name: str = "auto", num_threads: int | None = None) -> Kernels:
    """Kernels by name: ``auto`` takes the best that this machine has.

    ``num_threads`` defaults to the cores that this process may use; it counts the calling thread.
    The torch kernels run on torch's own threads and take no number.
    """
    available = available_kernels()
    chosen = available[0] if name == "auto" else name
    if chosen not in available:
        raise ConfigError(
            f"kernels {name!r} are not available here; available: auto, {', '.join(available)}"
            + ("" if len(available) > 1 else " (the native core was not built)")
        )
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads is {num_threads}, must be at least 1")
    if chosen == "torch":
        from tiermem.kernels.torch_kernels import TorchKernels

        return TorchKernels()
    from tiermem.kernels.native import NativeKernels

    return NativeKernels(chosen, num_threads or len(os.sched_getaffinity(0)))
