"""Fixtures that all tests share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return REPOSITORY


@pytest.fixture(autouse=True, scope="session")
def no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No profile of the drives of whoever runs the tests counts, here or in subprocesses."""
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        yield state


@pytest.fixture
def plain_environment() -> dict[str, str]:
    """The environment for subprocesses: no terminal colours, no wrapping at 80 columns."""
    drop = {"FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE"}
    kept = {key: value for key, value in os.environ.items() if key not in drop}
    return kept | {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a tmpfs of a size in bytes; skips where that is not permitted."""
    mounted: list[Path] = []

    def make(nbytes: int, *options: str) -> Path:
        point = tmp_path / f"mount{len(mounted)}"
        point.mkdir()
        flags = ",".join([f"size={nbytes}", *options])
        command = ["mount", "-t", "tmpfs", "-o", flags, "tmpfs", str(point)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("no mount command")
        if result.returncode:
            pytest.skip(f"mounting is not permitted: {result.stderr.strip()}")
        mounted.append(point)
        return point

    yield make
    for point in mounted:
        subprocess.run(["umount", str(point)], check=True)
