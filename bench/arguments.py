"""The command line's own words for counts and sizes, for the benchmarks' argument parsers."""

from __future__ import annotations

import argparse

import typer

import tiermem.io as tio
from tiermem.cli.bench import parse_size
from tiermem.cli.train import parse_count


def count(text: str) -> int:
    """``"350M"`` -> 350_000_000."""
    try:
        return parse_count(text)
    except typer.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from None


def size(text: str) -> int:
    """``"2GiB"`` -> bytes."""
    try:
        return parse_size(text)
    except typer.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from None


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The options that say how a path is driven; `queue_options` reads all but ``--backend``."""
    defaults = tio.QueueOptions()
    parser.add_argument("--backend", default="auto", help=f"auto, {', '.join(tio.BACKENDS)}")
    parser.add_argument("--chunk", type=size, default=defaults.chunk_bytes)
    parser.add_argument("--read-depth", type=int, default=defaults.read_depth)
    parser.add_argument("--write-depth", type=int, default=defaults.write_depth)


def queue_options(arguments: argparse.Namespace) -> tio.QueueOptions:
    return tio.QueueOptions(arguments.chunk, arguments.read_depth, arguments.write_depth)
