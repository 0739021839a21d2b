"""The options of `tiermem bench`. What measures is imported when the command runs."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(?:i?[bB])?")
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


class BufferPages(str, Enum):
    """What the buffers lie on."""

    huge = "huge"
    small = "small"
    both = "both"


def parse_size(text: str) -> int:
    """``"1.5GiB"`` -> bytes; units of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 4KiB, 2MiB, 1.5GiB or 4096")
    return round(float(match[1]) * (1 << _SHIFTS[match[2].lower()]))


def _parts(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes between commas; each once."""
    return tuple(dict.fromkeys(parse_size(part) for part in _parts(text) or [text]))


def parse_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas; each once."""
    try:
        return tuple(dict.fromkeys(int(part) for part in _parts(text) or [text]))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 1,8,32") from None


def parse_modes(text: str) -> tuple[str, ...]:
    """Modes between commas; each once."""
    modes = tuple(dict.fromkeys(_parts(text)))
    unknown = [mode for mode in modes if mode not in ("read", "write", "duplex")]
    if unknown or not modes:
        raise typer.BadParameter(f"{text!r} is not a list of read, write and duplex")
    return modes


def bench(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="directories to measure, one per drive")
    ],
    mode: Annotated[
        str, typer.Option(metavar="LIST", help="read, write, duplex (half read, half written at once)")
    ] = "read,write,duplex",
    block_size: Annotated[
        str, typer.Option(metavar="SIZES", help="of one transfer, e.g. 128KiB,1MiB,4MiB")
    ] = "2MiB",
    depth: Annotated[
        str, typer.Option(metavar="LIST", help="transfers in flight, per thread and direction")
    ] = "16",
    threads: Annotated[int, typer.Option(help="queues per path, each with a thread of its own")] = 1,
    size: Annotated[str, typer.Option(metavar="SIZE", help="of the file in each path")] = "1GiB",
    runtime: Annotated[
        float, typer.Option(metavar="SECONDS", help="of a run; 0: one pass over the file")
    ] = 2.0,
    loops: Annotated[int, typer.Option(help="runs of each mode and setting")] = 5,
    backend: Annotated[
        str, typer.Option(help="auto, io_uring, libaio, native_threads or threads (Python)")
    ] = "auto",
    direct: Annotated[
        bool, typer.Option("--direct/--buffered", help="O_DIRECT, or through the page cache")
    ] = True,
    pages: Annotated[
        BufferPages, typer.Option(help="that buffers lie on: 2 MiB, 4 KiB, or one against the other")
    ] = BufferPages.huge,
    verify: Annotated[
        bool, typer.Option("--verify", help="make and check all contents; any difference is an error")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="the result as one JSON object on stdout")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="picture of bandwidth over block size and depth"),
    ] = None,
) -> None:
    """Measure drives through the I/O engine, sequentially, with files that are removed afterwards."""
    modes, blocks = parse_modes(mode), parse_sizes(block_size)
    depths, size_bytes = parse_numbers(depth), parse_size(size)
    from tiermem.benchmark import Mode, Pages, Plan
    from tiermem.cli.benching import bench_plan

    both = (Pages.HUGE, Pages.SMALL)
    plan = Plan(
        paths=tuple(paths),
        modes=tuple(Mode(name) for name in modes),
        block_bytes=blocks,
        depths=depths,
        threads=threads,
        size_bytes=size_bytes,
        runtime=runtime,
        loops=loops,
        backend=backend,
        direct=direct,
        pages=both if pages is BufferPages.both else (Pages(pages.value),),
        verify=verify,
    )
    raise typer.Exit(bench_plan(plan, as_json=as_json, picture=plot))
