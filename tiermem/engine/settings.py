"""What an engine is set to, once ranks and batch sizes are known."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tiermem.config import DeepSpeedConfig, TierConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """``train_batch_size`` = ``micro_batch_size`` x ``accumulation_steps`` x ``world_size``."""

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    world_size: int  # ranks that have different samples
    local_rank: int
    gradient_clipping: float  # 0: none
    steps_per_print: int | None
    precision: str | None  # of the parameters: "bf16", "fp16", "fp32"; None: of several kinds


def settings_of(config: DeepSpeedConfig, mesh: DeviceMesh | None, precision: str | None) -> Settings:
    """``config`` on the ranks of ``mesh`` (None: all ranks), with parameters of ``precision``. Raises
    `ConfigError` if batch sizes do not fit."""
    world_size = mesh.size() if mesh is not None else num_ranks()
    batch = config.batch.resolve(world_size)
    assert batch.train is not None
    assert batch.micro is not None
    assert batch.accumulation is not None
    return Settings(
        train_batch_size=batch.train,
        micro_batch_size=batch.micro,
        accumulation_steps=batch.accumulation,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        gradient_clipping=config.gradient_clipping,
        steps_per_print=config.steps_per_print,
        precision=precision,
    )


def on_device(tier: TierConfig, device_type: str) -> TierConfig:
    """``tier`` for a device: on an accelerator optimizer states are updated on the host, so those that
    DeepSpeed would leave on the device lie there. Says so."""
    if device_type == "cpu" or tier.optimizer != "device":
        return tier
    logger.warning(
        "offload_optimizer.device is none: optimizer states of a model on %s lie in host memory all "
        "the same, where they are updated",
        device_type,
    )
    return tier.model_copy(update={"optimizer": "host"})


def rank_in(mesh: DeviceMesh | None) -> int:
    """This rank's number in ``mesh`` (None: among all ranks)."""
    if mesh is not None:
        return mesh.get_local_rank()
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def num_ranks() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
