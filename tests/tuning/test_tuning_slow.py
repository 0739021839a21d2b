"""A drive that moves nothing while it is measured has no figures, which is said."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tiermem.benchmark import Flow, Mode, Run, Session
from tiermem.cli.bar import Quiet
from tiermem.errors import ConfigError
from tiermem.io import Op
from tiermem.io.latency import Latency
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
