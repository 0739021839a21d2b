"""A short measurement for paths that were never tuned: enough for their shares, no more."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from tiermem.benchmark import Mode, Plan, Session
from tiermem.io import Op
from tiermem.tuning.profile import PathBandwidth

SECONDS = 0.3
_CHUNK_BYTES = 1 << 20
_DEPTH = 8
_FILE_BYTES = 32 << 20


class _Nobody:
    """An observer for where nobody watches."""

    def phase(self, text: str) -> None:
        pass

    def progress(self, runs: float) -> None:
        pass


def measure_quickly(
    paths: Sequence[Path], *, backend: str = "auto", direct: bool = True, seconds: float = SECONDS
) -> tuple[PathBandwidth, ...]:
    """Reads and writes a file of 32 MiB in each path, all at once and both directions; removes them.

    Raises `ConfigError` where there is no room (or memory) for that, `TierIOError` when a transfer
    fails.
    """
    plan = Plan(
        paths=tuple(paths),
        modes=(Mode.DUPLEX,),
        block_bytes=(_CHUNK_BYTES,),
        depths=(_DEPTH,),
        size_bytes=_FILE_BYTES,
        runtime=seconds,
        loops=1,
        backend=backend,
        direct=direct,
    )
    with Session(plan, _Nobody(), threading.Event()) as session:
        (result,) = session.results()
    (run,) = result.runs
    return tuple(
        PathBandwidth(None, None, flows[Op.READ].gb_per_s, flows[Op.WRITE].gb_per_s)
        for flows in run.paths
    )
