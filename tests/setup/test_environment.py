"""The set-up scripts do only what has changed since the last run.

The environment's Python is a stub that writes down what it is asked to do, so nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

STUB = """#!/usr/bin/env bash
case "$*" in
    *"-m pip install"*) echo "pip ${@: -1}" >>"$LOG" ;;
    setup.py*) echo "build" >>"$LOG"; [ -z "$BUILD_WORKS" ] || touch tiermem/_native.abi3.so ;;
    *"import tiermem._native"*) ls tiermem/_native*.so >/dev/null 2>&1 ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Tree:
    """A small copy of the repository with a stubbed environment."""

    def __init__(self, root: Path, repository: Path) -> None:
        self.root = root
        self.log = root / "log"
        for name in ("pyproject.toml", "setup.py", "tools/constraints.txt", "tools/_env.sh"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(repository / name, root / name)
        for name in ("tiermem", "native/src", ".venv/bin"):
            (root / name).mkdir(parents=True)
        (root / "native/src/core.c").write_text("int one;\n")
        stub = root / ".venv/bin/python"
        stub.write_text(STUB)
        stub.chmod(0o755)

    def ensure(self, extras: str = "train,dev", *, works: bool = True, **more: str) -> str:
        """Run ensure_env; what was said. The calls land in `calls`."""
        self.log.write_text("")
        environment = os.environ | {
            "LOG": str(self.log),
            "BUILD_WORKS": "1" if works else "",
            "REAL_PYTHON": sys.executable,
            "TIERMEM_ROOT": str(self.root),
            "TIERMEM_VENV": "",
        }
        script = f'set -euo pipefail; . "{self.root}/tools/_env.sh"; ensure_env {extras}'
        done = subprocess.run(
            ["bash", "-c", script], env=environment | more, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    @property
    def calls(self) -> list[str]:
        """What the last `ensure` made the environment's Python do."""
        return self.log.read_text().splitlines()


@pytest.fixture
def tree(tmp_path: Path, repository: Path) -> Tree:
    return Tree(tmp_path, repository)


def test_second_run_does_nothing(tree: Tree) -> None:
    tree.ensure()
    assert "pip .[train,dev]" in tree.calls
    tree.ensure()
    assert tree.calls == []
    tree.ensure("train")
    assert tree.calls == []


def test_test_tools_are_added_to_a_quickstart_environment(tree: Tree) -> None:
    tree.ensure("train")
    tree.ensure("train,dev")
    assert "pip .[train,dev]" in tree.calls


def _touch_constraints(root: Path) -> None:
    with (root / "tools/constraints.txt").open("a") as file:
        file.write("# changed\n")


def _edit_native(root: Path) -> None:
    (root / "native/src/core.c").write_text("int two;\n")


def _add_native(root: Path) -> None:
    (root / "native/src/more.c").write_text("")


@pytest.mark.parametrize("change", [_edit_native, _add_native])
def test_changed_native_sources_rebuild_only_the_core(
    tree: Tree, change: Callable[[Path], None]
) -> None:
    tree.ensure()
    change(tree.root)
    tree.ensure()
    assert tree.calls == ["build"]
    tree.ensure()
    assert tree.calls == []


def test_changed_constraints_install_again(tree: Tree) -> None:
    tree.ensure()
    _touch_constraints(tree.root)
    tree.ensure()
    assert "pip .[train,dev]" in tree.calls


def test_without_a_compiler_it_warns_each_time_and_tries_once(tree: Tree) -> None:
    said = tree.ensure(works=False)
    assert "native core is missing" in said
    assert "several times slower" in said
    assert "Install a C compiler" in said
    assert "build" in tree.calls
    assert "native core is missing" in tree.ensure(works=False)
    assert tree.calls == []


def test_a_compiler_that_appears_is_used(tree: Tree) -> None:
    tree.ensure(works=False, CC="/nowhere/gcc")
    said = tree.ensure(works=True, CC="/bin/sh")
    assert tree.calls == ["build"]
    assert "missing" not in said


def test_a_failed_rebuild_leaves_no_stale_core(tree: Tree) -> None:
    tree.ensure()
    _edit_native(tree.root)
    assert "native core is missing" in tree.ensure(works=False)
    assert not list((tree.root / "tiermem").glob("_native*.so"))


def test_the_constraints_pin_torch_and_what_is_asked_for(repository: Path) -> None:
    pinned = {
        line.split("==")[0].strip()
        for line in (repository / "tools/constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert {"torch", "numpy", "cffi", "pydantic", "typer", "rich", "psutil", "pytest"} <= pinned
