"""Runs `tiermem bench` on small files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SMALL = ("--size", "8MiB", "--block-size", "64KiB", "--depth", "4", "--loops", "2", "--runtime", "0")
ENDLESS = ("--size", "8MiB", "--block-size", "64KiB", "--depth", "4", "--runtime", "3600")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tiermem.cli", "bench", *map(str, arguments)]


def bench(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def bench_json(environment: dict[str, str], *arguments: object) -> dict[str, Any]:
    fields = json.loads(bench(environment, "--json", *arguments).stdout)
    assert isinstance(fields, dict)
    return fields


def left_in(*paths: Path) -> list[Path]:
    return [entry for path in paths for entry in path.iterdir()]


def shown_on_a_terminal(line: list[str], environment: dict[str, str]) -> bytes:
    """What the command shows on stderr where that is a terminal."""
    main, terminal = os.openpty()
    process = subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=terminal, env=environment | {"TERM": "xterm"}
    )
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(main, 4096):
            shown += part
    except OSError:  # the terminal's other end is closed
        pass
    finally:
        os.close(main)
    assert process.wait(60) == 0
    return shown


def heed_signals() -> None:
    """For a child: a shell's background job, such as these tests may be, ignores Ctrl-C, and so would
    what it starts."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def running(
    line: list[str], path: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """The command, when its file in ``path`` exists; killed in the end."""
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=heed_signals,
    )
    try:
        deadline = time.monotonic() + 60
        while not list(path.glob("*/gen0.bin")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()
