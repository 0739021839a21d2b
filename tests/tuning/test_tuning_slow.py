"""A drive that moves nothing while it is measured, or for ever too little, has no figures, which is
said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiermem.benchmark import Flow, Mode, Run, Session
from tiermem.cli.bar import Quiet
from tiermem.errors import ConfigError
from tiermem.io import Op
from tiermem.io.latency import Latency
from tiermem.tuning.quick import measure_quickly
from tiermem.tuning.tuner import TunePlan, Tuner


@pytest.mark.parametrize("still", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("which", [0, 1])
def test_nothing_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: Op, which: int
) -> None:
    """In one direction, in one of the paths; else shares or their file would fail later."""

    def run(session: Session, rig: Any, mode: Mode, *_: Any, only: int | None = None) -> Run:
        def flow(number: int, op: Op) -> Flow:
            moves = only in (None, number) and (number, op) != (which, still)
            return Flow(moves << 20, int(moves), 0.1, Latency())

        return Run(tuple({op: flow(number, op) for op in mode.ops} for number in (0, 1)), 0.0)

    monkeypatch.setattr(Session, "run", run)
    paths = tmp_path / "a", tmp_path / "b"
    for path in paths:
        path.mkdir()
    plan = TunePlan(paths, budget=1.0, size_bytes=128 << 20)
    with (
        Tuner(plan, Quiet(), threading.Event()) as tuner,
        pytest.raises(ConfigError, match=f"{paths[which]} ended no block.*--budget"),
    ):
        tuner.run()


def test_a_path_too_slow_to_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"measuring {tmp_path} took longer than 0 s"):
        measure_quickly([tmp_path], limit_seconds=0)
    assert list(tmp_path.iterdir()) == []


def test_a_path_too_slow_to_be_tuned(throttled_paths: Callable[..., list[Path]]) -> None:
    """At 4 MB/s the file alone takes half a minute."""
    (path,) = throttled_paths(4_000_000)
    with pytest.raises(ConfigError, match=r"took longer than --budget 2 s.*--size"):
        Tuner(TunePlan((path,), budget=2.0, size_bytes=128 << 20), Quiet(), threading.Event())
    assert [each.name for each in path.iterdir() if "tiermem" in each.name] == []
