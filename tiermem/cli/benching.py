"""Runs `tiermem bench` and shows what comes of it."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tiermem.benchmark import Mode, Plan, Result, Session
from tiermem.benchmark.cautions import result_cautions
from tiermem.cli.bar import watch
from tiermem.cli.bench_tables import head_lines, legend, pages_lines, result_table
from tiermem.cli.stopping import Stopping
from tiermem.errors import TierMemError

_RUNS = "{task.completed:.0f} of {task.total:.0f} runs"


def bench_plan(plan: Plan, *, as_json: bool, picture: Path | None) -> int:
    """Measures and prints; the exit code (128 + signal when it was stopped)."""
    if picture is not None:
        from tiermem.benchmark.plot import check_plot

        check_plot(picture)
    results: list[Result] = []
    failure: TierMemError | None = None
    with Stopping("stopping and removing the files") as stopping:
        with (
            watch(Console(stderr=True), plan.num_runs, _RUNS) as observer,
            Session(plan, observer, stopping.event) as session,
        ):
            try:
                for result in session.results():
                    results.append(result)
            except TierMemError as error:  # what was measured before it is shown
                failure = error
        warnings = [
            *session.warnings,
            *result_cautions(results, [place.site for place in session.places]),
        ]
        stopped = stopping.requested or failure is not None
        if as_json:
            print(json.dumps(_fields(session, results, warnings, stopped=stopped)))
        else:
            _show(session, results, warnings, verified=plan.verify and failure is None)
        if picture is not None and results:
            from tiermem.benchmark.plot import draw

            draw(results, _title(session), picture)
            print(f"tiermem: the picture is {picture}", file=sys.stderr)
    if failure is not None:
        raise failure
    return stopping.code


def _title(session: Session) -> str:
    places = ", ".join(f"{place.site.path} ({place.site.mount.filesystem})" for place in session.places)
    return f"{places}, {session.backend}, {platform.node()}"


def _fields(
    session: Session, results: Sequence[Result], warnings: Sequence[str], *, stopped: bool
) -> dict[str, Any]:
    paths = [str(path) for path in session.plan.paths]
    return {
        "tiermem": metadata.version("tiermem"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "processor": platform.machine(),
        **session.head(),
        "warnings": list(warnings),
        "results": [result.fields(paths) for result in results],
        "stopped": stopped,
    }


def _show(
    session: Session, results: Sequence[Result], warnings: Sequence[str], *, verified: bool
) -> None:
    console = Console()
    for line in head_lines(session):
        console.print(Text(line), soft_wrap=True)
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    if results:
        table = result_table(results, [str(path) for path in session.plan.paths])
        # Never narrower than its contents: figures that are cut off are none.
        wide = console.options.update(width=1000)
        console.width = max(console.width, console.measure(table, options=wide).maximum)
        console.print(table)
        console.print(Text(legend(table)), soft_wrap=True)
    for line in pages_lines(results):
        console.print(Text(line), soft_wrap=True)
    if verified and results:
        written = any(result.mode is not Mode.READ for result in results)
        what = "read and written" if written else "read"
        console.print(Text(f"verified: everything {what} is what was written"), soft_wrap=True)
