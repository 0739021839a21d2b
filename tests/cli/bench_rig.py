"""Runs `tiermem bench` on small files."""

from __future__ import annotations

import json
import subprocess
import sys
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
