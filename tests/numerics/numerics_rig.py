"""A small network, its data, and where its states may lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 64

PLACEMENTS = ("host", "nvme", "device")


def make_net(seed: int = 0) -> nn.Sequential:
    """Sizes are multiples of 64, so that torch's fused update takes its vector path."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Tanh(),
        nn.Linear(2 * WIDTH, 2 * WIDTH),
        nn.Linear(2 * WIDTH, 64),
    )


def batch(step: int, dtype: torch.dtype = torch.float32, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def placed(placement: str, base: Path) -> dict[str, Any]:
    """A configuration with everything but small biases in ``placement``."""
    return {
        "params": placement,
        "optimizer": placement,
        "device": "cpu",
        "host_memory": "16MiB",
        "paths": [str(base)] if placement == "nvme" else [],
        "persistence_threshold_numel": 100,
        "resident_memory": 0,
        "pin_memory": False,
    }
