"""On drives of different speeds the shares follow the speeds. On real, throttled block devices."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tiermem.tuning.choice import choose_paths

FAST = 150_000_000


@pytest.mark.parametrize("slow", [FAST, FAST // 3])
def test_shares_follow_the_throttle(throttled_paths: Callable[..., list[Path]], slow: int) -> None:
    """The machine may stall in the middle of any one measurement."""
    paths = throttled_paths(FAST, slow)
    expected = slow / (FAST + slow)
    found = []
    for _ in range(4):
        use = choose_paths(paths, io={})
        assert use.weights_from.startswith("measured")
        found.append(use.weights[1])
        if abs(found[-1] / expected - 1) < 0.15:
            return
    pytest.fail(f"shares of the second path: {found}, by its throttle {expected:.3f}")


def test_everything_is_taken_down(throttled: ModuleType) -> None:
    drives = throttled.ThrottledDrives([FAST, FAST], nbytes=32 << 20)
    devices = list(drives._devices)
    points = [path.parent for path in drives.paths]
    assert all(point.is_mount() for point in points)
    group = drives._group
    assert group.is_dir()
    drives.close()
    drives.close()
    assert not group.exists()
    assert not points[0].parent.exists()
    shown = subprocess.run(
        ["losetup", "--list", "--output", "BACK-FILE"], capture_output=True, text=True
    )
    assert devices
    assert str(points[0].parent) not in shown.stdout


def test_what_fails_half_way_is_taken_down_too(throttled: ModuleType, tmp_path: Path) -> None:
    """The second drive cannot be throttled to a negative speed."""
    with pytest.raises(OSError, match="Invalid argument"):
        throttled.ThrottledDrives([FAST, -1], nbytes=32 << 20, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
