"""The options of `tiermem train`."""

from __future__ import annotations

import importlib.util
import math
import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from tiermem.cli.stopping import Stopping
from tiermem.errors import ConfigError

_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([kKmMbBgGtT]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}

LARGEST = 2**31 - 1
"""Of any size: more is a slip of the finger."""


class Place(str, Enum):
    """Where states live."""

    device = "device"
    host = "host"
    nvme = "nvme"


class Precision(str, Enum):
    """What computes."""

    bf16 = "bf16"
    fp32 = "fp32"


class Update(str, Enum):
    """When parameters are updated."""

    deferred = "deferred"
    backward = "backward"


class Schedule(str, Enum):
    """How the learning rate goes."""

    constant = "constant"
    cosine = "cosine"


def parse_count(text: str) -> int:
    """``"125M"`` -> 125_000_000; factors of 1000."""
    match = _COUNT.fullmatch(text.strip())
    value = float(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    count = round(value) if value < math.inf else 0
    if count < 1:
        raise typer.BadParameter(f"{text!r} is not a count such as 125M, 1.5B or 350000000")
    return count


def train(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="text files or directories [default: Python's standard library]"),
    ] = None,
    params: Annotated[
        int | None,
        typer.Option(
            parser=parse_count,
            metavar="COUNT",
            help="about so many parameters, e.g. 350M [default: 125M]",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="with --hidden, in place of --params")
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="width of the model")] = None,
    heads: Annotated[int | None, typer.Option(min=1, max=LARGEST, help="[default: hidden/64]")] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, max=LARGEST, help="positions the model has [default: 1024, or the sequence length]"
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="sequences in a step, on each rank")
    ] = 4,
    sequence_length: Annotated[int, typer.Option(min=1, max=LARGEST, help="bytes in a sequence")] = 256,
    steps: Annotated[int, typer.Option(min=1, max=LARGEST, help="optimizer steps")] = 100,
    lr: Annotated[float, typer.Option(min=0, help="peak learning rate")] = 3e-4,
    schedule: Annotated[Schedule, typer.Option(help="of the learning rate")] = Schedule.constant,
    warmup: Annotated[int, typer.Option(min=0, max=LARGEST, help="steps of linear warm-up")] = 0,
    weight_decay: Annotated[float, typer.Option(min=0, help="decoupled")] = 0.1,
    clip: Annotated[
        float | None, typer.Option(min=0, help="clip gradients to this norm; 0 is off [default: 0]")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="of the computation [default: bf16]")
    ] = None,
    update: Annotated[
        Update | None,
        typer.Option(help="[default: backward, or deferred with --clip]"),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3,
            help="of ZeRO: what ranks share out, of states, gradients, params [default: 3]",
        ),
    ] = None,
    params_on: Annotated[Place | None, typer.Option(help="[default: nvme]")] = None,
    optimizer_on: Annotated[Place | None, typer.Option(help="[default: nvme]")] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(
            help="directory for states, one per drive; {rank} and {local_rank} are filled in "
            "[default: in the temporary directory]"
        ),
    ] = None,
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="budget, e.g. 256MiB")] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="budget for gathered parameters"),
    ] = None,
    resident_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="host memory that keeps parts of what lies on NVMe"),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=-(2**63), max=2**64 - 1, help="of the initial values and the data")
    ] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="train in memory with plain PyTorch too; compare the losses")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="the result as one JSON object on stdout")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="JSON file with a TierConfig; options here win over it"),
    ] = None,
) -> None:
    """Train a byte-level GPT whose states need not fit in memory."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "training needs torch, which is not installed: pip install '.[train]' in the clone"
        )
    # Here, so that --help need not wait for pydantic.
    from tiermem.cli.job import ModelSize, TrainJob

    settings: dict[str, Any] = {
        "compute_dtype": precision.value if precision else None,
        "update": update.value if update else None,
        "stage": stage,
        "params": params_on.value if params_on else None,
        "optimizer": optimizer_on.value if optimizer_on else None,
        "paths": [str(directory) for directory in path] if path else None,
        "gradient_clipping": clip,
        "host_memory": host_memory,
        "device_memory": device_memory,
        "resident_memory": resident_memory,
    }
    if sequence_length > (context or sequence_length):
        raise ConfigError(f"--sequence-length {sequence_length} does not fit --context {context}")
    job = TrainJob(
        size=ModelSize(params, layers, hidden, heads, context or max(1024, sequence_length)),
        files=tuple(files or ()),
        batch_size=batch_size,
        sequence_length=sequence_length,
        steps=steps,
        learning_rate=lr,
        cosine=schedule is Schedule.cosine,
        warmup=warmup,
        weight_decay=weight_decay,
        seed=seed,
        check=check,
        as_json=as_json,
        config_file=config,
        settings={key: value for key, value in settings.items() if value is not None},
    )
    with Stopping("stopping after this step; once more stops at once") as stopping:
        try:
            from tiermem.cli.training import train_job

            stopping.check()
            code = train_job(job, stopping)
        except KeyboardInterrupt:
            code = stopping.code
    raise typer.Exit(code)
