"""What a person sees while training runs: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from tiermem.types import format_bytes

PLAIN_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step. ``before`` and ``after`` are the runtime's statistics around it."""

    step: int
    loss: float
    seconds: float
    tokens: int
    before: Any
    after: Any

    @property
    def figures(self) -> str:
        """The step in one line."""
        read = (self.after.read_bytes - self.before.read_bytes) / self.seconds / 1e9
        written = (self.after.written_bytes - self.before.written_bytes) / self.seconds / 1e9
        stalled = (self.after.stall_seconds - self.before.stall_seconds) / self.seconds
        return (
            f"loss {self.loss:.4f}  {self.tokens / self.seconds:,.0f} tokens/s  "
            f"host {_of(self.after.host)}  device {_of(self.after.device)}  "
            f"read {read:.2f} GB/s  write {written:.2f} GB/s  stalled {min(1.0, stalled):.0%}"
        )


def _of(memory: Any) -> str:
    return f"{format_bytes(memory.used)}/{format_bytes(memory.budget)}"


class ProgressView(Protocol):
    """Takes the steps as they finish."""

    def update(self, report: StepReport) -> None: ...


class _Bar:
    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=steps, figures="the first step also fills the tiers")

    def update(self, report: StepReport) -> None:
        self._progress.update(self._task, completed=report.step, figures=report.figures)


class _Lines:
    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._last = float("-inf")

    def update(self, report: StepReport) -> None:
        now = time.monotonic()
        if report.step < self._steps and now - self._last < PLAIN_INTERVAL_SECONDS:
            return
        self._last = now
        self._console.print(
            f"step {report.step}/{self._steps}  {report.figures}", highlight=False, soft_wrap=True
        )


@contextmanager
def open_progress(console: Console, steps: int) -> Iterator[ProgressView]:
    """A live bar where ``console`` is a terminal, plain lines every few seconds elsewhere."""
    if not console.is_terminal:
        yield _Lines(console, steps)
        return
    columns = (
        SpinnerColumn(),
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        yield _Bar(progress, steps)
