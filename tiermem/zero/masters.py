"""The fp32 masters of 16-bit parameters, and how they are kept.

[Note: masters] A bf16 parameter is the upper half of its master, rounded; the other half is kept as a
16-bit remainder (``master: "split"``), so that both together take 4 bytes, not 6. An fp16 parameter
has another exponent, so its master is kept whole, as a bf16 one's is with ``master: "fp32"``; the
parameter is then the master rounded to nearest even. A parameter that the user overwrites becomes
its own master. A whole master that exists has values: unlike other states it does not start at zero.
"""

from __future__ import annotations

import torch

from tiermem.config import TierConfig
from tiermem.kernels import Kernels
from tiermem.types import Field


def master_state(dtype: torch.dtype, config: TierConfig) -> tuple[Field, torch.dtype] | None:
    """The state in which trainable parameters of ``dtype`` keep their master; see [Note: masters].
    None: they are their own."""
    if dtype == torch.bfloat16 and config.master == "split":
        return Field.MASTER_LO, torch.int16
    if dtype in (torch.bfloat16, torch.float16):
        return Field.MASTER, torch.float32
    return None


def master_itemsize(dtype: torch.dtype, config: TierConfig) -> int:
    """Bytes per element of the state in which the master is kept."""
    state = master_state(dtype, config)
    return 0 if state is None else state[1].itemsize


def store_master(
    kernels: Kernels, master: torch.Tensor, param: torch.Tensor, state: torch.Tensor
) -> None:
    """Sets ``param`` and its ``state`` so that the master is ``master``; all 1-D and of one length."""
    if state.dtype == torch.int16:
        kernels.split_master(master.to(torch.float32).contiguous(), param, state)
    else:
        state.copy_(master)
        param.copy_(state)
