"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
