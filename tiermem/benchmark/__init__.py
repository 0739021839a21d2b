"""Measures what the I/O engine reaches in a directory. Imports no torch.

`Session` makes the files of a `Plan`, measures, and removes them again::

    with Session(Plan(paths=(Path("/mnt/nvme"),)), observer, threading.Event()) as session:
        for result in session.results(): ...
"""

from __future__ import annotations

from tiermem.benchmark.figures import Flow, Result, Run, Spread
from tiermem.benchmark.plan import Mode, Pages, Plan, Setting
from tiermem.benchmark.rig import Rig
from tiermem.benchmark.session import Observer, Session

__all__ = [
    "Flow",
    "Mode",
    "Observer",
    "Pages",
    "Plan",
    "Result",
    "Rig",
    "Run",
    "Session",
    "Setting",
    "Spread",
]
