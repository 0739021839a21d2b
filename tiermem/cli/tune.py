"""The options of `tiermem tune`. What measures is imported when the command runs."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tiermem.cli.bench import parse_size

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?")
_SECONDS = {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}


class Emit(str, Enum):
    """Whose configuration is printed."""

    tiermem = "tiermem"
    deepspeed = "deepspeed"


def parse_duration(text: str) -> float:
    """``"1.5m"`` -> seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 30s, 2m or 90")
    return float(match[1]) * _SECONDS[match[2]]


def tune(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="directories to be used together, one per drive"),
    ],
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="how long it may take, e.g. 30s or 5m")
    ] = "60s",
    size: Annotated[str, typer.Option(metavar="SIZE", help="of the file in each path")] = "1GiB",
    backend: Annotated[
        str, typer.Option(help="only this one: io_uring, libaio, native_threads or threads")
    ] = "auto",
    emit: Annotated[
        Emit | None,
        typer.Option(help="print only a configuration on stdout: tiermem's, or DeepSpeed's aio block"),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="the profile; default: where tiermem.Runtime finds it, below $XDG_STATE_HOME/tiermem",
        ),
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="keep no profile")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="everything as one JSON object on stdout")
    ] = False,
) -> None:
    """Find the settings that drives are best read and written with at once, and save them.

    Nearly all of the time is spent writing as much as reading: on a fast drive, tens of gigabytes.
    """
    if save is not None and no_save:
        raise typer.BadParameter("--save and --no-save exclude each other")
    seconds, size_bytes = parse_duration(budget), parse_size(size)
    from tiermem.cli.tuning import Wishes, tune_paths
    from tiermem.tuning.tuner import TunePlan

    plan = TunePlan(paths=tuple(paths), budget=seconds, size_bytes=size_bytes, backend=backend)
    wishes = Wishes(emit=emit.value if emit else None, file=save, keep=not no_save, as_json=as_json)
    raise typer.Exit(tune_paths(plan, wishes))
