"""The first signal asks for an end, a second one does not wait."""

from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from tiermem.cli.stopping import Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_asks_second_raises(capsys: pytest.CaptureFixture[str], number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Stopping("ending soon") as stopping:
        stopping.check()
        assert stopping.code == 0
        os.kill(os.getpid(), number)
        assert stopping.requested
        assert stopping.event.is_set()
        assert stopping.code == 128 + number
        with pytest.raises(KeyboardInterrupt):
            stopping.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
    assert "tiermem: ending soon" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(5, "gone"), RuntimeError("reentrant"), ValueError("closed")])
def test_an_error_stream_that_fails_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The terminal may be what went away."""

    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    with Stopping("ending soon") as stopping:
        monkeypatch.setattr(sys, "stderr", Failing())
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopping.code == 128 + signal.SIGHUP


def test_without_an_error_stream_nothing_goes_to_the_other_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the result as JSON is to be read."""
    with Stopping("ending soon") as stopping:
        monkeypatch.setattr(sys, "stderr", None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.requested
    assert capsys.readouterr().out == ""


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping("") as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopping.requested
    finally:
        signal.signal(signal.SIGHUP, before)
