"""The command line: its commands, and how errors are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tiermem.cli.bench import bench
from tiermem.cli.doctor import doctor
from tiermem.cli.output import OutputError, checked_output
from tiermem.cli.train import train
from tiermem.cli.tune import tune
from tiermem.errors import TierMemError

EXIT_ERROR = 1

app = typer.Typer(
    name="tiermem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich's takes 80 ms to import, of the 300 that help may take
)

app.command(short_help="train a GPT whose states need not fit in memory")(train)
app.command(short_help="measure how fast drives are")(bench)
app.command(short_help="find and save the best settings for drives")(tune)
app.command(short_help="say what works on this machine, and what to do")(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"tiermem {metadata.version('tiermem')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show it and exit")
    ] = False,
) -> None:
    """Train models that do not fit in memory: states on device, host and NVMe."""


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. What tiermem raises on purpose is one message, no traceback,
    and so is a standard output that cannot be written."""
    try:
        with checked_output():
            return _run(arguments)
    except OutputError as error:
        _say(f"cannot write to standard output: {error.strerror}")
    except BrokenPipeError:
        pass
    return EXIT_ERROR


def _run(arguments: Sequence[str]) -> int:
    try:
        app(args=list(arguments), prog_name="tiermem")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_ERROR
    except TierMemError as error:
        _say(str(error))
        return EXIT_ERROR
    return 0


def _say(message: str) -> None:
    Console(stderr=True).print(Text(f"error: {message}", style="red"), soft_wrap=True)
