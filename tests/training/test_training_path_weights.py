"""A runtime says what it uses of its paths and where that is from, and the bytes lie accordingly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from training_rig import run_directories, tier_config, train

import tiermem
import tiermem.tuning.choice
from tiermem.tuning.candidates import Candidate
from tiermem.tuning.identity import Identity, identify
from tiermem.tuning.profile import (
    PathBandwidth,
    Profile,
    ProfiledPath,
    profile_file,
    save_profile,
)

Drives = Callable[[int], list[str]]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def config(paths: Sequence[str], **changes: object) -> dict[str, object]:
    return tier_config(
        params="nvme", optimizer="nvme", resident_memory=0, paths=paths, stripe_bytes=4096, **changes
    )


def save_profile_of(identities: Sequence[Identity], speeds: Sequence[float]) -> Path:
    paths = [
        ProfiledPath("/d", identity, PathBandwidth(speed, speed, speed, speed), speed, (speed, speed))
        for identity, speed in zip(identities, speeds, strict=True)
    ]
    file = profile_file(identities)
    settings = Candidate("threads", 1 << 16, 3, 5)
    save_profile(Profile(tuple(paths), settings, "2026-01-01", "6.1"), file)
    return file


def test_measured_weights_are_shown_and_nothing_is_left(drives: Drives) -> None:
    paths = drives(2)
    with tiermem.Runtime(config(paths)) as runtime:
        stats = runtime.stats()
        assert [share.path for share in stats.paths] == paths
        assert sum(share.weight for share in stats.paths) == pytest.approx(1.0)
        assert stats.path_weights_from.startswith("measured")
        assert all(s.bandwidth is not None and s.bandwidth.balanced_gb_per_s > 0 for s in stats.paths)
        assert stats.read_bytes == stats.written_bytes == 0  # measuring is not training
        assert len(run_directories(paths)) == 2
    assert run_directories(paths) == []


def test_bytes_follow_a_profiles_shares(drives: Drives, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = drives(2)
    identities = {Path(path): Identity("ext4", path, ()) for path in paths}
    monkeypatch.setattr(tiermem.tuning.choice, "identify", identities.__getitem__)
    file = save_profile_of(list(identities.values()), [3.0, 1.0])
    trained = train(config(paths, io=None))
    assert trained.stats is not None
    assert str(file) in trained.stats.path_weights_from
    first, second = trained.stats.paths
    assert (first.weight, second.weight) == pytest.approx((0.75, 0.25))
    share = first.written_bytes / (first.written_bytes + second.written_bytes)
    assert share == pytest.approx(0.75, abs=0.03)


def test_settings_come_from_a_profile_where_the_user_gave_none(drives: Drives) -> None:
    paths = drives(1)
    file = save_profile_of([identify(Path(paths[0]))], [2.0])
    with tiermem.Runtime(config(paths, io={"read_depth": 7})) as runtime:
        stats = runtime.stats()
        assert stats.io == Candidate("threads", 1 << 16, 7, 5)
        assert stats.io_from == f"io and the profile {file}"
        assert stats.backend == "threads"
        assert stats.path_weights_from == "one path"
        assert runtime.path_use.bandwidths == (PathBandwidth(2.0, 2.0, 2.0, 2.0),)


def test_without_nvme_there_are_no_paths() -> None:
    with tiermem.Runtime(tier_config()) as runtime:
        stats = runtime.stats()
        assert stats.paths == ()
        assert runtime.path_use.weights == ()
