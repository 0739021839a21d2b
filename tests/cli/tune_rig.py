"""Runs `tiermem tune` on small files for a few seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SHORT = ("--size", "128MiB", "--budget", "4s")

Environment = dict[str, str]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tiermem.cli", "tune", *map(str, arguments)]


def run(environment: Environment, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment, timeout=120
    )


def tune(environment: Environment, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = run(environment, *arguments)
    assert done.returncode == 0, done.stderr
    return done


def tune_json(environment: Environment, *arguments: object) -> dict[str, Any]:
    fields = json.loads(tune(environment, "--json", *SHORT, *arguments).stdout)
    assert isinstance(fields, dict)
    return fields
