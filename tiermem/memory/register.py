"""Registering host memory with an accelerator, so that its transfers need no bounce buffer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


def wants_registration(device: str | None) -> bool:
    """Whether memory for ``device`` should be registered.

    ``None`` asks torch for the current accelerator, but only if torch has been imported already: a
    process that never uses torch has no accelerator to copy to.
    """
    if device is not None:
        return device.split(":")[0] == "cuda"
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "accelerator"):
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "cuda"


def register_host_memory(address: int, nbytes: int) -> Callable[[], None] | None:
    """Page-locks ``nbytes`` at ``address`` for CUDA; the function that undoes it.

    Populates all of it. Returns None, and says why in the log, if the driver refuses.
    """
    import torch

    if not torch.cuda.is_available():
        logger.warning("host memory is not registered: torch sees no CUDA device")
        return None
    cuda: Any = torch.cuda  # cudart() is untyped
    runtime: Any = cuda.cudart()
    error = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    if error:
        logger.warning(
            "cudaHostRegister of %d bytes failed with error %d; device transfers go through a bounce "
            "buffer (give a smaller host budget or raise `ulimit -l`)",
            nbytes,
            error,
        )
        return None

    def unregister() -> None:
        failed = int(runtime.cudaHostUnregister(address))
        if failed:
            logger.warning("cudaHostUnregister failed with error %d", failed)

    return unregister
