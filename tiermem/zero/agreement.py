"""Whether the ranks shard the same model in the same way. What differs would be found out later, or
never: layouts, budgets and options say who exchanges what, and when."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from tiermem.comm import Communicator, Kind, Message
from tiermem.config import TierConfig
from tiermem.errors import StateError
from tiermem.zero import compat

if TYPE_CHECKING:
    from tiermem.zero.plan import PlannedGroup

_ALIKE = (
    "stage",
    "params",
    "device_memory",
    "compute_dtype",
    "master",
    "fp16",
    "gradient_accumulation_dtype",
    "effective_update",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "prefetch_bytes",
    "persistence_threshold_numel",
    "overlap_comm",
    "reduce_bucket_numel",
    "allgather_bucket_numel",
    "max_live_numel",
    "max_reuse_numel",
)
"""What all ranks must set alike. Paths and host memory may differ: each rank has its own."""


def check_alike(
    comm: Communicator,
    config: TierConfig,
    groups: Sequence[PlannedGroup],
    model: nn.Module,
    number: int,
) -> None:
    """Raises `StateError`, on all ranks, that says what differs from the first rank. Collective;
    ``number`` is that of its messages."""
    if comm.size == 1:
        return
    facts = {f"{key} (here {getattr(config, key)!r})": getattr(config, key) for key in _ALIKE}
    facts["the model's units, or names, shapes, dtypes or requires_grad of its parameters"] = [
        (group.name, group.layout) for group in groups
    ]
    facts["names, shapes or dtypes of the model's buffers"] = [
        (name, compat.local_tensor(buffer).shape, buffer.dtype)
        for name, buffer in model.named_buffers()
    ]
    sums = torch.tensor([zlib.crc32(repr(fact).encode()) for fact in facts.values()])
    rows = [torch.empty_like(sums) if rank != comm.rank else sums for rank in range(comm.size)]
    comm.exchange(Message(Kind.SETUP, number, "what is sharded"), [sums] * comm.size, rows).wait()
    for rank, row in enumerate(rows):
        different = [what for what, a, b in zip(facts, row, rows[0], strict=True) if int(a) != int(b)]
        if different:
            raise StateError(
                f"{comm.names[rank]} and {comm.names[0]} do not shard alike; they differ in: "
                f"{'; '.join(different)}. Remedy: the same model and configuration on all ranks (only "
                f"paths, host memory and what belongs to the drives may differ)"
            )


def share_buffers(comm: Communicator, model: nn.Module, number: int) -> None:
    """The first rank's buffers on all ranks, as parameters are. Collective."""
    if comm.size == 1:
        return
    for name, tensor in model.named_buffers():
        buffer = compat.local_tensor(tensor)
        if buffer.layout is not torch.strided or buffer.is_meta or _overlaps(buffer):
            continue
        with torch.inference_mode(False), torch.no_grad():
            flat = buffer.detach().to("cpu").contiguous().reshape(-1)
            comm.share_first(Message(Kind.SETUP, number, name), flat)
            if comm.rank:
                buffer.copy_(flat.view(buffer.shape))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as after ``expand``: such a tensor cannot be written."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
