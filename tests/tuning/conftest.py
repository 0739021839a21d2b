"""A place for profiles of each test's own, and drives of a chosen speed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles are kept during the test."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    return directory / "tiermem"


@pytest.fixture(scope="session")
def throttled(repository: Path) -> ModuleType:
    """bench/throttled.py; skips where it cannot work."""
    sys.path.insert(0, str(repository / "bench"))
    try:
        import throttled
    finally:
        sys.path.remove(str(repository / "bench"))
    if reason := throttled.why_not():
        pytest.skip(f"no throttled drives: {reason}")
    return throttled


@pytest.fixture
def throttled_paths(throttled: ModuleType) -> Iterator[Callable[..., list[Path]]]:
    """``throttled_paths(limits)``: directories on drives with these limits in bytes per second."""
    made = []

    def make(*limits: int, nbytes: int = 1 << 29) -> list[Path]:
        made.append(throttled.ThrottledDrives(limits, nbytes=nbytes))
        return list(made[-1].paths)

    yield make
    for drives in made:
        drives.close()
