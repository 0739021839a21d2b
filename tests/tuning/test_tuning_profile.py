"""Profiles are kept as a whole, found by the drives they are of, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import profile_of

from tiermem.errors import ConfigError, TierIOError
from tiermem.tuning.choice import choose_paths
from tiermem.tuning.identity import Identity, identify
from tiermem.tuning.profile import (
    Profile,
    load_profile,
    profile_file,
    save_profile,
    shares,
    state_directory,
)

ONE = Identity("ext4", "01", (("A drive", 1000),))
TWO = Identity("xfs", "02", (("Another", 2000),))


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    profile = profile_of([ONE, TWO], [3.0, 1.0])
    file = tmp_path / "deep" / "er" / "profile.json"
    save_profile(profile, file)
    assert load_profile(file) == profile
    assert profile.weights == pytest.approx((0.75, 0.25))
    assert json.loads(file.read_text())["version"] == 1
    assert [entry.name for entry in file.parent.iterdir()] == ["profile.json"]


def test_saving_replaces_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "profile.json"
    save_profile(profile_of([ONE], [3.0]), file)
    before = file.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TierIOError, match=r"profile\.json.*No space.*--no-save"):
        save_profile(profile_of([ONE], [9.0]), file)
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("speeds", [(3.0, 1.0), (1.0, 3.0)])
def test_bandwidths_come_in_the_order_of_the_paths(speeds: tuple[float, float]) -> None:
    profile = profile_of([ONE, TWO], speeds)
    swapped = profile.bandwidths_for([TWO, ONE])
    assert swapped is not None
    assert [each.duplex_read_gb_per_s for each in swapped] == [speeds[1], speeds[0]]
    for others in ([ONE], [TWO], [ONE, ONE], [ONE, TWO, TWO], []):
        assert profile.bandwidths_for(others) is None


def test_the_file_is_named_by_the_set_of_drives() -> None:
    assert profile_file([ONE, TWO]) == profile_file([TWO, ONE])
    assert len({profile_file(each) for each in ([ONE], [TWO], [ONE, TWO], [ONE, ONE])}) == 4


def test_directories_of_one_file_system_are_one_drive(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert identify(tmp_path) == identify(tmp_path / "a")
    if Path("/proc").is_dir():
        assert identify(tmp_path) != identify(Path("/proc"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("/state", "/state/tiermem"), ("relative", "HOME/.local/state/tiermem"), ("", None)],
)
def test_where_profiles_are(
    given: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", given)
    wanted = (expected or "HOME/.local/state/tiermem").replace("HOME", str(tmp_path))
    assert state_directory() == Path(wanted)


def test_a_user_without_a_home_has_no_profiles_and_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="--save"):
        state_directory()
    assert choose_paths([tmp_path], io={}).settings_from == "defaults"


def wrong(**changes: Any) -> str:
    return json.dumps(profile_of([ONE], [3.0]).fields() | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"kind": "something else"}',
        wrong(version=2),
        wrong(paths=[]),
        wrong(paths=[{}]),
        wrong(paths=7),
        wrong(settings={}),
        wrong(settings={"backend": "magic", "chunk_bytes": 4096, "read_depth": 1, "write_depth": 1}),
        wrong(settings={"backend": "libaio", "chunk_bytes": 100, "read_depth": 1, "write_depth": 1}),
        wrong(settings={"backend": "libaio", "chunk_bytes": 4096, "read_depth": 0, "write_depth": 1}),
        wrong(settings={"backend": "libaio", "chunk_bytes": 4096, "read_depth": 1.5, "write_depth": 1}),
        wrong().replace("3.0", "-3.0"),
        wrong().replace("3.0", "NaN"),
        wrong().replace("3.0", "1" + "0" * 400),
        wrong().replace('"size_bytes": ', '"size_bytes": 1e400, "was": '),
        wrong().replace("3.0", "true"),
        wrong().replace('"version": 1, ', ""),
    ],
)
def test_what_is_no_profile_is_passed_over_with_one_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "tiermem"):
        assert load_profile(file) is None
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert "tiermem tune" in record.getMessage()


def test_what_is_not_text_or_no_file_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert load_profile(file) is None
    assert load_profile(tmp_path) is None
    assert len(caplog.records) == 2


def test_none_is_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_profile(tmp_path / "absent.json") is None
    assert not caplog.records


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(TierIOError, match="--save"):
        save_profile(profile_of([ONE], [3.0]), tmp_path / "a" / "profile.json")


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=5).filter(lambda all: max(all) > 1e-3))
def test_shares_are_positive_and_add_up(speeds: list[float]) -> None:
    found = shares(speeds)
    assert sum(found) == pytest.approx(1.0)
    assert all(share > 0 for share in found)
    fastest = max(speeds)
    for speed, share in zip(speeds, found, strict=True):
        expected = max(speed, 1e-4 * fastest) / fastest
        assert share / max(found) == pytest.approx(expected)


def test_fields_are_what_json_can_hold() -> None:
    profile = profile_of([ONE, TWO], [3.0, 1.0])
    assert Profile.of_fields(json.loads(json.dumps(profile.fields()))) == profile
