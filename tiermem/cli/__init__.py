"""The `tiermem` command. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from tiermem.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before or after a command's own handling of it
        code = 130
    sys.exit(code)
