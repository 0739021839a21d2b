"""The command line's own words for counts and sizes, for the benchmarks' argument parsers."""

from __future__ import annotations

import argparse

import typer

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
