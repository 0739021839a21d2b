"""The floor that a training step is held against follows from the byte diet."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "train_step_figures", repository / "bench/train_step_figures.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_step_figures"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("update", "spilled", "read", "written"),
    [("backward", False, 14, 12), ("deferred", False, 14, 12), ("deferred", True, 16, 14)],
)
def test_phases_add_up_to_the_diet(
    bench: ModuleType, update: str, spilled: bool, read: int, written: int
) -> None:
    phases = bench.nominal_phases("bf16", update, spilled).values()
    assert (sum(p.read for p in phases), sum(p.written for p in phases)) == (read, written)


def test_io_time_is_the_better_of_together_and_one_by_one(bench: ModuleType) -> None:
    drive = bench.Bandwidth(read=3.0, write=4.0, duplex_read=2.0, duplex_write=2.0, direct=True)
    assert drive.seconds(6.0, 0.0) == pytest.approx(2.0)
    assert drive.seconds(0.0, 8.0) == pytest.approx(2.0)
    assert drive.seconds(4.0, 4.0) == pytest.approx(2.0)
    assert drive.seconds(7.0, 4.0) == pytest.approx(2.0 + 1.0)
    slow_together = bench.Bandwidth(read=3.0, write=4.0, duplex_read=0.5, duplex_write=0.5, direct=True)
    assert slow_together.seconds(3.0, 4.0) == pytest.approx(2.0)


def test_the_better_measurement_counts(bench: ModuleType) -> None:
    one = bench.Bandwidth(read=3.0, write=4.0, duplex_read=2.0, duplex_write=1.0, direct=True)
    two = bench.Bandwidth(read=2.0, write=5.0, duplex_read=2.0, duplex_write=2.0, direct=True)
    assert bench.best(one, two) == bench.Bandwidth(3.0, 5.0, 2.0, 2.0, True)
