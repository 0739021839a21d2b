"""A short measurement for paths that were never tuned: enough for their shares, no more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tiermem.benchmark import Flow, Mode, Plan, Session
from tiermem.errors import ConfigError
from tiermem.io import Op
from tiermem.tuning.profile import PathBandwidth

RUN_SECONDS = 0.3
"""Limits of volumes are kept over periods of about 0.1 s: shorter runs show the period."""

MAX_RUNS = 3
_AGREEMENT = 0.05
_CHUNK_BYTES = 512 << 10  # small, so that a slow path too moves many of them in a run
_DEPTH = 16
_FILE_BYTES = 32 << 20

LIMIT_SECONDS = 15.0
"""A path that is not measured by then is too slow to wait for."""


class _Nobody:
    """An observer for where nobody watches."""

    def phase(self, text: str) -> None:
        pass

    def progress(self, runs: float) -> None:
        pass


def measure_quickly(
    paths: Sequence[Path],
    *,
    backend: str = "auto",
    direct: bool = True,
    limit_seconds: float = LIMIT_SECONDS,
) -> tuple[PathBandwidth, ...]:
    """Reads and writes a file of 32 MiB in each path, all at once and both directions; removes them.
    Two runs that agree in every path are enough; else there is a third, and each path's figures are
    those of its median run, which a single stall of the machine does not move.

    Raises `ConfigError` where there is no room (or memory) for that, or it takes longer than
    ``limit_seconds``; `TierIOError` when a transfer fails.
    """
    plan = Plan(
        paths=tuple(paths),
        modes=(Mode.DUPLEX,),
        block_bytes=(_CHUNK_BYTES,),
        depths=(_DEPTH,),
        size_bytes=_FILE_BYTES,
        runtime=RUN_SECONDS,
        loops=1,
        backend=backend,
        direct=direct,
    )
    stop = threading.Event()
    with (
        _timer(limit_seconds, stop),
        Session(plan, _Nobody(), stop) as session,
        contextlib.ExitStack() as stack,
    ):
        rig = session.open_rig(stack, next(plan.settings()))
        runs: list[tuple[PathBandwidth, ...]] = []
        while len(runs) < 2 or (len(runs) < MAX_RUNS and not _agree(*runs[-2:])):
            run = session.run(rig, Mode.DUPLEX)
            if run is None:
                named = ", ".join(map(str, paths))
                raise ConfigError(
                    f"measuring {named} took longer than {limit_seconds:g} s; give path_weights, or "
                    f"leave the slow one out"
                )
            runs.append(tuple(map(_bandwidth, run.paths)))
    return tuple(_median(of_path) for of_path in zip(*runs, strict=True))


@contextlib.contextmanager
def _timer(seconds: float, stop: threading.Event) -> Iterator[None]:
    timer = threading.Timer(seconds, stop.set)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _bandwidth(flows: Mapping[Op, Flow]) -> PathBandwidth:
    return PathBandwidth(None, None, flows[Op.READ].gb_per_s, flows[Op.WRITE].gb_per_s)


def _agree(one: Sequence[PathBandwidth], other: Sequence[PathBandwidth]) -> bool:
    pairs = [(a.balanced_gb_per_s, b.balanced_gb_per_s) for a, b in zip(one, other, strict=True)]
    return all(abs(a - b) <= _AGREEMENT * max(a, b) for a, b in pairs)


def _median(runs: Sequence[PathBandwidth]) -> PathBandwidth:
    """Of two, the slower one."""
    return sorted(runs, key=lambda each: each.balanced_gb_per_s)[(len(runs) - 1) // 2]
