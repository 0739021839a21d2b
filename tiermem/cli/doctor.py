"""`tiermem doctor`: shows what `tiermem.doctor` finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from tiermem.doctor import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="directories that are to hold states, one per drive "
            "[default: where `tiermem train` puts them]",
            metavar="PATH",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="the findings as one JSON object on stdout")
    ] = False,
) -> None:
    """Say what works on this machine, what does not, and what to do about it.

    Everything is tried: I/O backends, O_DIRECT, locking memory, huge pages, kernels, torch. Findings
    are ok, note (works; something that costs little is missing) or problem (something does not work
    or is much slower than it could be). The exit code is 1 if there is a problem, else 0.
    """
    from tiermem.cli.directory import default_parent
    from tiermem.doctor import diagnose, works

    findings = diagnose(paths or [default_parent()])
    if as_json:
        print(json.dumps(_as_object(findings), indent=2))
    else:
        _show(findings)
    if not works(findings):
        raise typer.Exit(1)


def _as_object(findings: Sequence[Finding]) -> dict[str, object]:
    """``works``, the number of findings by level, and the findings with all their fields."""
    from dataclasses import asdict

    from tiermem.doctor import Level, works

    counts = {level.value: sum(one.level is level for one in findings) for level in Level}
    rows = [asdict(one) | {"level": one.level.value} for one in findings]
    return {"works": works(findings), "counts": counts, "findings": rows}


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    arrow = "→" if console.encoding.startswith("utf") else "->"
    places = ["", *dict.fromkeys(one.path for one in findings if one.path)]
    about, topic_width = "", max(len(one.topic) for one in findings)
    table = _table(topic_width)
    for one in sorted(findings, key=lambda one: places.index(one.path)):
        if one.path != about:
            console.print(table)
            console.print()
            console.print(Text(one.path, style="bold"), soft_wrap=True)
            table, about = _table(topic_width), one.path
        text = Text(one.text)
        if one.remedy:
            text.append(f"\n{arrow} {one.remedy}", style="italic")
        table.add_row(Text(one.level.value, style=_STYLES[one.level.value]), one.topic, text)
    console.print(table)
    problems = sum(one.level.value == "problem" for one in findings)
    console.print(Text(f"{problems} problem{'s' if problems != 1 else ''}"))


def _table(topic_width: int) -> Table:
    """All with the same columns."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(min_width=max(map(len, _STYLES)))
    table.add_column(min_width=topic_width)
    table.add_column()
    return table
