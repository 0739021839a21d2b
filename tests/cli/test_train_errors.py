"""What cannot work is one message that says why and what would, with no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tiermem.cli.app import run

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_tiermem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run the command in an empty directory; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "200")):
        monkeypatch.setenv(name, value)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


SMALL = ("--layers", "1", "--hidden", "64", "--steps", "1", "--sequence-length", "16")
HOST = ("--params-on", "host", "--optimizer-on", "host")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SMALL, *HOST, "nowhere.txt"), "no such file or directory: nowhere.txt"),
        ((*SMALL, *HOST, "empty.txt"), "nothing but empty files"),
        ((*SMALL, *HOST, "short.txt"), "needs at least 17"),
        ((*SMALL, "--params", "1M"), "exclude each other"),
        (("--layers", "2"), "both --layers and --hidden"),
        (("--layers", "1", "--hidden", "64", "--heads", "5"), "not a multiple of num_heads"),
        ((*SMALL, "--context", "8"), "--sequence-length 16 does not fit --context 8"),
        ((*SMALL, "--host-memory", "lots"), "host_memory"),
        ((*SMALL, "--update", "backward", "--clip", "1"), "cannot clip"),
        ((*SMALL, "--config", "absent.json"), "cannot read the configuration absent.json"),
        ((*SMALL, "--config", "bad.json"), "not JSON"),
        ((*SMALL, "--config", "typo.json"), "did you mean 'host_memory'"),
    ],
)
def test_one_message_and_exit_code_1(
    run_tiermem: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("0123456789abcdef")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "typo.json").write_text('{"host_memorx": 1, "paths": ["."]}')
    code, _, error = run_tiermem("train", *arguments)
    assert code == 1, error
    assert message in error
    assert error.splitlines()[0].startswith("error: ")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("--params", "many"),
        ("--params", "9" * 400),
        ("--seed", "99999999999999999999"),
        ("--layers", "9999999999"),
        ("--steps", "0"),
        ("--nope",),
        ("--update", "x"),
    ],
)
def test_usage_errors_exit_with_2(run_tiermem: Run, arguments: tuple[str, ...]) -> None:
    code, _, error = run_tiermem("train", *arguments)
    assert code == 2
    assert "Traceback" not in error


def test_help_lists_the_options(run_tiermem: Run) -> None:
    code, out, _ = run_tiermem("train", "--help")
    assert code == 0
    for option in ("--params", "--host-memory", "--optimizer-on", "--check", "--update", "--path"):
        assert option in out
