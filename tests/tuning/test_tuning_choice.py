"""What a runtime uses: the user's word, else a profile of these drives, else a measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from profiles import SETTINGS, profile_of, save_for

import tiermem.tuning.choice
from tiermem.errors import ConfigError
from tiermem.io import probe_backends
from tiermem.tuning.candidates import Candidate
from tiermem.tuning.choice import choose_paths, open_chosen_engine
from tiermem.tuning.identity import Identity, identify
from tiermem.tuning.profile import profile_file, save_profile


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    return paths


@pytest.fixture
def never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it measured")

    monkeypatch.setattr(tiermem.tuning.choice, "measure_quickly", fail)


def left_in(paths: list[Path]) -> list[Path]:
    return [entry for path in paths for entry in path.iterdir()]


def test_without_anything_it_measures_and_says_so(
    pair: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tiermem.tuning"):
        use = choose_paths(pair, io={})
    assert sum(use.weights) == pytest.approx(1.0)
    assert all(weight > 0.05 for weight in use.weights)  # both are on one drive
    assert use.weights_from.startswith("measured")
    assert use.bandwidths is not None
    assert all(each.balanced_gb_per_s > 0 for each in use.bandwidths)
    assert all(each.read_gb_per_s is None for each in use.bandwidths)
    assert use.settings == Candidate("auto")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert any("path shares" in text and str(pair[0]) in text for text in said)
    assert left_in(pair) == []


@pytest.mark.usefixtures("never_measured")
def test_one_path_and_none_need_no_measurement(pair: list[Path]) -> None:
    assert choose_paths(pair[:1], io={}).weights == (1.0,)
    assert choose_paths([], io={}).weights == ()


@pytest.mark.usefixtures("never_measured")
def test_the_users_weights_win(pair: list[Path]) -> None:
    save_for(pair, [3.0, 1.0])
    use = choose_paths(pair, weights=(5.0, 2.0), io={})
    assert use.weights == (5.0, 2.0)
    assert use.weights_from == "path_weights"
    assert use.settings == SETTINGS
    assert use.bandwidths is not None


@pytest.mark.usefixtures("never_measured")
def test_a_profile_of_these_drives(monkeypatch: pytest.MonkeyPatch, pair: list[Path]) -> None:
    by_path = {pair[0]: Identity("ext4", "01", ()), pair[1]: Identity("ext4", "02", ())}
    monkeypatch.setattr(tiermem.tuning.choice, "identify", by_path.__getitem__)
    file = profile_file(list(by_path.values()))
    save_profile(profile_of(list(by_path.values()), [3.0, 1.0]), file)
    use = choose_paths(pair, io={})
    assert use.weights == pytest.approx((0.75, 0.25))
    assert str(file) in use.weights_from
    assert use.settings == SETTINGS
    assert use.queue_options.write_depth == SETTINGS.write_depth
    turned = choose_paths(pair[::-1], io={})
    assert turned.weights == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize(
    "io",
    [
        {"chunk_bytes": 65536},
        {"backend": "threads"},
        {"read_depth": 3, "write_depth": 5},
        {"backend": "auto", "chunk_bytes": 4096, "read_depth": 1, "write_depth": 1},
    ],
)
def test_each_key_of_io_that_is_given_wins(pair: list[Path], io: dict[str, Any]) -> None:
    save_for(pair[:1], [3.0])
    settings = choose_paths(pair[:1], io=io).settings
    assert settings.fields() == SETTINGS.fields() | io


def test_settings_of_a_larger_set_serve_and_its_shares_do_not(pair: list[Path]) -> None:
    other = Identity("ext4", "99", ())
    for number, date in ((4, "2026-03-01"), (8, "2026-02-01")):
        identities = [identify(pair[0]), *[other] * number]
        profile = profile_of(
            identities, [1.0] * len(identities), Candidate("libaio", 1 << 20, number, number), date
        )
        save_profile(profile, profile_file(identities))
    use = choose_paths(pair[:1], io={})
    assert use.settings.read_depth == 4  # the newer one
    assert use.bandwidths is None
    assert choose_paths(pair, io={}).weights_from.startswith("measured")


def test_a_corrupt_profile_is_named_once_and_passed_over(
    pair: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    file = save_for(pair, [3.0, 1.0])
    file.write_text("{")
    assert choose_paths(pair, io={}).weights_from.startswith("measured")
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([text for text in warnings if str(file) in text]) == 1


def test_no_room_to_measure_gives_equal_shares(
    pair: list[Path], mount: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    small = mount(8 << 20)
    use = choose_paths([pair[0], small], io={})
    assert use.weights == (0.5, 0.5)
    assert use.weights_from.startswith("equal")
    assert use.bandwidths is None
    assert any("path_weights" in record.getMessage() for record in caplog.records)
    assert left_in([pair[0], small]) == []


def test_a_backend_of_a_profile_that_does_not_work_any_more_is_replaced(
    pair: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_for(pair[:1], [3.0])
    use = choose_paths(pair[:1], io={})
    real = tiermem.tuning.choice.open_engine

    def no_libaio(backend: str, directory: Any) -> Any:
        if backend == "libaio":
            raise ConfigError("backend libaio does not work: it was forbidden")
        return real(backend, directory)

    monkeypatch.setattr(tiermem.tuning.choice, "open_engine", no_libaio)
    engine = open_chosen_engine(use, {}, pair[0])
    assert engine.name != "libaio"
    engine.close()
    assert any("forbidden" in record.getMessage() for record in caplog.records)
    with pytest.raises(ConfigError, match="forbidden"):
        open_chosen_engine(use, {"backend": "libaio"}, pair[0])


def test_the_profiles_backend_is_opened(pair: list[Path]) -> None:
    if probe_backends(pair[0])["native_threads"] != "works":
        pytest.skip("native_threads does not work here")
    save_for(pair[:1], [3.0], Candidate("native_threads"))
    engine = open_chosen_engine(choose_paths(pair[:1], io={}), {}, pair[0])
    assert engine.name == "native_threads"
    engine.close()
