"""What `tiermem train` was asked to do. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermem.cli.directory import default_directory
from tiermem.cli.ranks import Ranks, path_of_rank
from tiermem.config import TierConfig, is_deepspeed, load_config, read_json
from tiermem.errors import ConfigError

DEFAULT_PARAMETERS = 125_000_000


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Either a parameter count or explicit sizes."""

    parameters: int | None
    layers: int | None
    hidden: int | None
    heads: int | None
    context: int

    def __post_init__(self) -> None:
        explicit = (self.layers, self.hidden, self.heads)
        if self.parameters is not None and any(explicit):
            raise ConfigError("--params and --layers, --hidden, --heads exclude each other")
        if any(explicit) and not (self.layers and self.hidden):
            raise ConfigError("explicit sizes need both --layers and --hidden")


@dataclass(frozen=True, slots=True)
class TrainJob:
    """One training run. Sizes in elements, tokens and steps."""

    size: ModelSize
    files: tuple[Path, ...]
    batch_size: int
    sequence_length: int
    steps: int
    learning_rate: float
    cosine: bool
    warmup: int
    weight_decay: float
    seed: int
    check: bool
    as_json: bool
    config_file: Path | None
    settings: Mapping[str, Any]  # TierConfig keys given on the command line

    def tier_config(self, ranks: Ranks | None = None) -> TierConfig:
        """The configuration file, overridden by the command line, completed by defaults; paths are
        those of this rank."""
        values: dict[str, Any] = {
            "params": "nvme",
            "optimizer": "nvme",
            "compute_dtype": "bf16",
            "malloc_mmap_threshold": "4MiB",  # the process is ours: peaks come close to what is live
        }
        if self.config_file is not None:
            values.update(_read(self.config_file))
        values.update(self.settings)
        if values.get("stage", 3) != 3 and values["params"] == "nvme":
            values["params"] = "device"  # the default here is for stage 3
        values.setdefault("gradient_accumulation_steps", 1)
        values.setdefault("gradient_clipping", 0.0)
        if values["gradient_accumulation_steps"] != 1:
            raise ConfigError(
                "tiermem train takes one micro-step: gradient_accumulation_steps must be 1"
            )
        if "nvme" in (values["params"], values["optimizer"]) and not values.get("paths"):
            values["paths"] = [str(default_directory())]
        if ranks is not None and isinstance(values.get("paths"), list):
            values["paths"] = [path_of_rank(path, ranks) for path in values["paths"]]
        return load_config(values)


def _read(path: Path) -> dict[str, Any]:
    """What a configuration file sets, in tiermem's own vocabulary."""
    given = read_json(path)
    if not isinstance(given, dict):
        raise ConfigError(f"{path} holds no JSON object")
    if not is_deepspeed(given):
        return given
    values = load_config(given).model_dump(exclude_unset=True)
    values["paths"] = [str(each) for each in values.get("paths", ())]
    return values
