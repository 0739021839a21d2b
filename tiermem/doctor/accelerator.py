"""torch and the device that it finds."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from tiermem.doctor.finding import Finding, Level
from tiermem.types import format_bytes

_OLDEST = (2, 9)  # pyproject.toml, extra "train"


def check_torch() -> list[Finding]:
    """Whether torch can be imported and is new enough, and the accelerator it finds."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        if not version and isinstance(error, ImportError):
            return [_missing()]
        text = f"{version or 'of an unknown version'} does not load: {type(error).__name__}: {error}"
        return [Finding("torch", Level.PROBLEM, text, "reinstall torch")]
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if numbers < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        text = f"{torch.__version__} is older than {oldest}, which tiermem is made for"
        return [Finding("torch", Level.PROBLEM, text, f"pip install 'torch>={oldest}'"), _device(torch)]
    return [Finding("torch", Level.OK, torch.__version__), _device(torch)]


def _missing() -> Finding:
    return Finding(
        "torch",
        Level.PROBLEM,
        "not installed: nothing can be trained; tiermem.io and this command work without",
        "pip install '.[train]' in the clone",
    )


def _device(torch: Any) -> Finding:
    try:
        accelerator = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count() if accelerator is not None else 0
        if count == 0:
            return Finding(
                "device",
                Level.NOTE,
                "torch finds no accelerator: models compute on the CPU, and device memory is ordinary "
                "memory under its own budget",
                "if there is one, install its driver and the torch that is built for it",
            )
        names = [_describe(torch, accelerator.type, index) for index in range(count)]
    except Exception as error:  # drivers raise anything
        text = f"{type(error).__name__}: {error}"
        return Finding("device", Level.PROBLEM, text, "check the accelerator's driver")
    return Finding("device", Level.OK, "; ".join(names))


def _describe(torch: Any, kind: str, index: int) -> str:
    if kind != "cuda":
        return f"{kind}:{index}"
    properties = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {properties.name}, {format_bytes(properties.total_memory)}"
