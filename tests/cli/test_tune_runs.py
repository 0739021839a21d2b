"""`tiermem tune` end to end: what it finds, says, saves and leaves behind."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest
from bench_rig import left_in, shown_on_a_terminal
from tune_rig import SHORT, Environment, command, run, tune, tune_json

import tiermem.cli.app
import tiermem.cli.tuning
from tiermem.config import load_config
from tiermem.errors import IOContext, TierIOError
from tiermem.tuning.candidates import Candidate
from tiermem.tuning.choice import choose_paths
from tiermem.tuning.profile import load_profile, save_profile


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.mkdir()
    return path


@pytest.fixture
def state(tmp_path: Path, plain_environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's profiles are kept, here and in what it runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    plain_environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    return tmp_path / "state" / "tiermem"


def test_it_finds_says_how_sure_and_saves(
    drive: Path, state: Path, plain_environment: Environment
) -> None:
    found = tune_json(plain_environment, drive)
    assert found["seconds"] < 4 + 4  # the budget, and what was begun within it
    assert found["runs"] > 10
    assert found["settings_tried"] >= 2
    assert found["written_bytes"] > 0
    assert found["stopped"] is False
    if found["gain"]["low"] is not None:
        assert found["gain"]["low"] <= found["gain"]["median"] <= found["gain"]["high"]
    assert found["is_distinguishable"] == (found["chosen"] != found["default"])
    profile = load_profile(Path(found["saved"]))
    assert profile is not None
    assert profile.fields() == found["profile"]
    assert list(state.iterdir()) == [Path(found["saved"])]
    (path,) = profile.paths
    low, high = path.spread
    assert 0 < low <= high
    assert path.bandwidth.read_gb_per_s is not None
    assert left_in(drive) == []
    # A runtime finds it.
    use = choose_paths([drive], io={})
    assert use.settings == profile.settings
    assert found["saved"] in use.settings_from


def test_several_paths_have_shares_of_use_together(
    drive: Path, tmp_path: Path, state: Path, plain_environment: Environment
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    found = tune_json(plain_environment, drive, other)
    assert found["together_over_alone"] > 0
    weights = found["profile"]["weights"]
    assert sum(weights) == pytest.approx(1.0, abs=1e-4)
    speeds = [
        min(path["duplex_read_gb_per_s"], path["duplex_write_gb_per_s"])
        for path in found["profile"]["paths"]
    ]
    assert weights[0] == pytest.approx(speeds[0] / sum(speeds), rel=1e-3)
    assert any("share one device" in text for text in found["warnings"])
    assert choose_paths([drive, other], io={}).weights_from.endswith(found["saved"])
    assert left_in(drive, other) == []


@pytest.mark.usefixtures("state")
def test_emitted_configuration_is_all_of_stdout(drive: Path, plain_environment: Environment) -> None:
    ours = tune(plain_environment, drive, *SHORT, "--emit", "tiermem")
    config = load_config({"params": "nvme", "optimizer": "nvme", **json.loads(ours.stdout)})
    assert config.paths == (drive,)
    assert "search" in ours.stderr
    theirs = tune(plain_environment, drive, *SHORT, "--emit", "deepspeed", "--backend", "threads")
    assert list(json.loads(theirs.stdout)) == ["aio"]


def test_saving_elsewhere_and_not_at_all(
    drive: Path, tmp_path: Path, state: Path, plain_environment: Environment
) -> None:
    file = tmp_path / "mine.json"
    shown = tune(plain_environment, drive, *SHORT, "--save", file).stdout
    assert load_profile(file) is not None
    assert str(file) in shown
    for word in ("device", "search", "settings", "the default", "both at once"):
        assert word in shown
    assert tune_json(plain_environment, drive, "--no-save")["saved"] is None
    assert not state.exists()


@pytest.mark.usefixtures("state")
def test_a_budget_too_short_to_search_says_so(drive: Path, plain_environment: Environment) -> None:
    found = tune(plain_environment, drive, "--size", "128MiB", "--budget", "1s").stdout
    assert "--budget" in found


def test_what_was_too_short_to_compare_replaces_no_profile(
    drive: Path, state: Path, plain_environment: Environment
) -> None:
    brief = ("--size", "128MiB", "--budget", "1s")
    tune(plain_environment, drive, *brief)
    (saved,) = state.iterdir()
    profile = load_profile(saved)
    assert profile is not None
    better = dataclasses.replace(
        profile, settings=Candidate("libaio", 1 << 20, 7, 9), date="2001-02-03"
    )
    save_profile(better, saved)
    said = tune(plain_environment, drive, *brief).stdout
    assert "not saved" in said
    assert "2001-02-03" in said
    assert load_profile(saved) == better
    # By name it is replaced: somebody wants this one.
    assert "saved" in tune(plain_environment, drive, *brief, "--save", saved).stdout
    assert load_profile(saved) != better


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "soon"), "30s"),
        (("--budget", "0.1s"), "budget is 0.1 s"),
        (("--size", "1MiB"), "--size"),
        (("--backend", "magic"), "io_uring"),
        (("--emit", "yaml"), "deepspeed"),
        (("--save", "a", "--no-save"), "exclude"),
    ],
)
def test_what_cannot_work_is_said(
    drive: Path, plain_environment: Environment, arguments: tuple[str, ...], words: str
) -> None:
    done = run(plain_environment, drive, *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert left_in(drive) == []


def test_a_profile_that_cannot_be_saved(drive: Path, plain_environment: Environment) -> None:
    done = run(plain_environment, drive, *SHORT, "--save", "/proc/none/profile.json")
    assert done.returncode == 1
    assert "/proc/none/profile.json" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_in(drive) == []


def test_where_a_profile_cannot_be_is_found_before_anything_is_measured(
    drive: Path, tmp_path: Path, state: Path, plain_environment: Environment
) -> None:
    """An hour of measuring is not thrown away at its end, and no test waits for it."""
    hour = ("--size", "128MiB", "--budget", "1h")
    state.parent.write_text("a file, where a directory is wanted")
    for arguments in ((), ("--save", ""), ("--save", tmp_path), ("--save", "/proc/none/profile.json")):
        done = run(plain_environment, drive, *hour, *arguments)
        assert done.returncode == 1
        assert "name a" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert left_in(drive) == []


def test_what_was_found_is_shown_though_it_cannot_be_saved(
    drive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The place for it may go meanwhile."""

    def fail(profile: object, file: Path) -> None:
        raise TierIOError(errno.ENOSPC, IOContext("saving the profile", str(file), 0, 0))

    monkeypatch.setattr(tiermem.cli.tuning, "save_profile", fail)
    file = tmp_path / "profile.json"
    code = tiermem.cli.app.run(["tune", str(drive), *SHORT[:2], "--budget", "1s", "--save", str(file)])
    shown = capsys.readouterr()
    assert code == 1
    assert "No space left on device" in shown.err
    assert "both at once" in shown.out
    assert "saved" not in shown.out
    assert list(tmp_path.iterdir()) == [drive]


@pytest.mark.usefixtures("state")
def test_a_bar_on_a_terminal(drive: Path, plain_environment: Environment) -> None:
    shown = shown_on_a_terminal(command(drive, *SHORT), plain_environment)
    assert b"duplex 2 MiB depth" in shown
    assert b"of 4 s" in shown
