"""Standard output that says when it is what failed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class OutputError(OSError):
    """Standard output cannot be written: a full disk, a closed descriptor."""


class _Output:
    """``stream``, whose errors are `OutputError`, so that they are told from all others. A broken
    pipe stays what it is: readers such as ``head`` leave, and nobody has to be told."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _named():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with _named():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Inside, ``sys.stdout`` raises `OutputError`, and shows what its encoding has not as ``?``; at the
    end it is flushed. Once it has failed, what
    it still holds is thrown away, or the interpreter would fail on it again at its exit."""
    stream: Any = sys.stdout
    if stream is None:  # closed before the start
        yield
        return
    if getattr(stream, "errors", None) == "strict":
        # An encoding without a character of a table, or with a file's name that is no text.
        stream.reconfigure(errors="replace")
    output: Any = _Output(stream)
    try:
        with contextlib.redirect_stdout(output):
            yield
            output.flush()
    except (OutputError, BrokenPipeError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        raise
