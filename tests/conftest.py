"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return REPOSITORY


@pytest.fixture
def plain_environment() -> dict[str, str]:
    """The environment for subprocesses: no terminal colours, no wrapping at 80 columns."""
    drop = {"FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE"}
    kept = {key: value for key, value in os.environ.items() if key not in drop}
    return kept | {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
