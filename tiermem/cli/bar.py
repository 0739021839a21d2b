"""What a person sees while something is measured: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Bar:
    """An observer of a session or a tuner that moves a bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def progress(self, done: float) -> None:
        self._progress.update(self._task, completed=done)


class Quiet:
    """An observer for where nobody watches."""

    def phase(self, text: str) -> None:
        pass

    def progress(self, done: float) -> None:
        pass


@contextlib.contextmanager
def watch(console: Console, total: float, count: str) -> Iterator[Bar | Quiet]:
    """``count`` is how to show how much of ``total`` is done, a format of ``task.completed`` and
    ``task.total``."""
    if not console.is_terminal:
        yield Quiet()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(count), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, progress.add_task("starting", total=total))
