"""Light parts stay light: torch is imported only by what computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "statement",
    [
        "import tiermem",
        "import tiermem.io",
        "import tiermem.errors",
        "import tiermem.config",
        "import tiermem.benchmark",
        "import tiermem.doctor",
        "import tiermem.cli.app",
        "import tiermem.cli.benching",
        "import tiermem.cli.tuning",
        "import tiermem.tuning.choice",
    ],
)
def test_torch_is_not_imported(statement: str, repository: Path) -> None:
    code = f"{statement}\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


def test_the_io_engine_needs_no_pydantic(repository: Path) -> None:
    modules = "tiermem.io, tiermem.benchmark, tiermem.tuning.choice, tiermem.tuning.tuner"
    code = f"import {modules}, sys; print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=repository, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


def test_layers_hold(repository: Path) -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([str(tool)], capture_output=True, text=True, cwd=repository, timeout=120)
    assert done.returncode == 0, done.stdout
