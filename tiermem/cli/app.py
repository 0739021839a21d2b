"""The command line: its commands, and how errors are shown."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import Console
from rich.text import Text

from tiermem.cli.doctor import doctor
from tiermem.cli.train import train
from tiermem.errors import TierMemError

EXIT_ERROR = 1

app = typer.Typer(
    name="tiermem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train models that do not fit in memory: states on device, host and NVMe.",
)


@app.callback()
def _commands() -> None:
    """Keeps `train` a sub-command while it is the only one."""


app.command()(train)
app.command()(doctor)


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. What tiermem raises on purpose is one message, no traceback."""
    try:
        app(args=list(arguments), prog_name="tiermem")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_ERROR
    except TierMemError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        return EXIT_ERROR
    return 0
