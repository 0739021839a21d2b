"""Measures what a search asks for, within a time budget, and what the chosen setting then gives."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import platform
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tiermem.benchmark import Mode, Pages, Plan, Run, Session, Setting
from tiermem.benchmark.plan import MAX_MEMORY_SHARE
from tiermem.errors import ConfigError
from tiermem.io import BACKENDS, AlignedBuffer, Op, probe_backends
from tiermem.memory.budget import available_host_memory
from tiermem.tuning.candidates import CHUNKS, DEPTHS, Candidate, Space
from tiermem.tuning.identity import identity_of
from tiermem.tuning.profile import PathBandwidth, Profile, ProfiledPath
from tiermem.tuning.search import Search
from tiermem.tuning.verdict import Round, Verdict
from tiermem.types import format_bytes

DEFAULT_BUDGET_SECONDS = 60.0
_MODES = (Mode.READ, Mode.WRITE, Mode.DUPLEX)
_RUNS_IN_BUDGET = 120
_RUN_SECONDS = (0.1, 0.5)  # shortest and longest
_RUN_OVERHEAD_SECONDS = 0.1  # until it is known
_FIGURES_SHARE = 0.2  # of the budget, for the figures of the chosen setting
_MAX_FIGURE_RUNS = 5
_SHARED_BELOW = 0.9


@dataclass(frozen=True, slots=True)
class TunePlan:
    """What to tune: all ``paths`` with one setting, used together as a `Runtime` does. ``budget`` in
    seconds, files of ``size_bytes`` in each path. Raises `ConfigError`."""

    paths: tuple[Path, ...]
    budget: float = DEFAULT_BUDGET_SECONDS
    size_bytes: int = 1 << 30
    backend: str = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.budget <= 86_400:
            raise ConfigError(
                f"the budget is {self.budget:g} s; it must be 1 to 86400, 30 or more to find something"
            )
        self.bench_plan()  # checks the rest

    @property
    def run_seconds(self) -> float:
        shortest, longest = _RUN_SECONDS
        return min(longest, max(shortest, self.budget / _RUNS_IN_BUDGET))

    def bench_plan(self) -> Plan:
        """Files and modes; settings come from the search."""
        default = Candidate(self.backend)
        return Plan(
            paths=self.paths,
            modes=_MODES,
            block_bytes=(default.chunk_bytes,),
            depths=(default.read_depth,),
            size_bytes=self.size_bytes,
            runtime=self.run_seconds,
            loops=1,
            backend=self.backend,
        )


class Watcher(Protocol):
    """Hears how far a tuner is."""

    def phase(self, text: str) -> None:
        """What begins now."""

    def progress(self, seconds: float) -> None:
        """How much of the budget has passed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. ``profile`` is None if it was stopped before its figures were known."""

    verdict: Verdict
    profile: Profile | None
    num_runs: int
    num_candidates: int
    seconds: float
    written_bytes: int
    """To all paths, by the search and the figures; files are written once more before."""

    together: float | None
    """Balanced duplex bandwidth of several paths at once over the sum of each alone; None of one."""

    @property
    def is_shared(self) -> bool:
        """Whether the paths hold each other up."""
        return self.together is not None and self.together < _SHARED_BELOW


def balanced(run: Run, number: int) -> float:
    """GB/s of one path, as much read as written: twice the slower direction."""
    flows = run.paths[number]
    return 2 * min(flows[op].gb_per_s for op in Op)


class Tuner:
    """The files of a plan, warmed, then `run`. A context manager; `close` removes everything.

    ``stop`` may be set at any time by any thread or signal handler. Raises what `Session` does.
    """

    def __init__(self, plan: TunePlan, watcher: Watcher, stop: threading.Event) -> None:
        self.plan = plan
        self._watcher = watcher
        self._stop = stop
        self._begin = time.monotonic()
        self._runs_seconds = 0.0
        self._num_runs = 0
        self._written_bytes = 0.0
        self._seen: set[Candidate] = set()
        self.session = self._open_session(plan, stop)

    def _open_session(self, plan: TunePlan, stop: threading.Event) -> Session:
        """The files, written once. Raises `ConfigError` if that leaves nothing of the budget."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            stop.set()

        timer = threading.Timer(plan.budget, give_up)
        timer.daemon = True
        timer.start()
        try:
            session = Session(plan.bench_plan(), _Relay(self), stop)
        finally:
            timer.cancel()
        if late.is_set():
            session.close()
            raise ConfigError(
                f"writing files of {format_bytes(plan.size_bytes)} took longer than --budget "
                f"{plan.budget:g} s: give a longer one, or a smaller --size"
            )
        return session

    def close(self) -> None:
        """Removes the files and directories. Idempotent."""
        self.session.close()

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def run(self) -> Outcome:
        """Searches, then takes the figures of what was chosen; ends when the budget does."""
        with contextlib.ExitStack() as stack:
            space = self._space()
            nbytes = max(map(self._buffer_bytes, _extremes(space)))
            buffer = self.session.open_buffers(stack, nbytes)
            search = Search(space)
            while names := search.next_round(self._runs_left()):
                results = self._round(names, buffer)
                if results is None:
                    break
                search.record(results)
            verdict = search.verdict()
            figures = self._figures(verdict.chosen, buffer)
        profile, together = (None, None) if figures is None else self._profile(verdict.chosen, figures)
        return Outcome(
            verdict=verdict,
            profile=profile,
            num_runs=self._num_runs,
            num_candidates=len(self._seen),
            seconds=self.elapsed,
            written_bytes=round(self._written_bytes),
            together=together,
        )

    # ---- the space

    def _space(self) -> Space:
        default = Candidate(self.session.backend)
        if self.plan.backend != "auto":
            return Space(default, (default.backend,), self._fits)
        probed = probe_backends(self.plan.paths[0])
        native = [name for name in BACKENDS if name != "threads" and probed[name] == "works"]
        return Space(default, tuple(native) or (default.backend,), self._fits)

    def _fits(self, candidate: Candidate) -> bool:
        if _setting(candidate).smallest_file_bytes > self.plan.size_bytes:
            return False
        limit = available_host_memory().available * MAX_MEMORY_SHARE
        return self._buffer_bytes(candidate) <= limit

    def _buffer_bytes(self, candidate: Candidate) -> int:
        return self.session.plan.buffer_bytes(_setting(candidate))

    # ---- runs

    @property
    def _run_cost(self) -> float:
        """Seconds that a run takes in all."""
        if not self._num_runs:
            return self.plan.run_seconds + _RUN_OVERHEAD_SECONDS
        return self._runs_seconds / self._num_runs

    @property
    def _kinds(self) -> list[tuple[Mode, int | None]]:
        """The runs that give the figures once: each path alone, then all together."""
        several = len(self.plan.paths) > 1
        modes = _MODES if several else (Mode.READ, Mode.WRITE)
        alone = itertools.product(modes, range(len(self.plan.paths)))
        return [*alone, (Mode.DUPLEX, None)]

    @property
    def _figure_loops(self) -> int:
        wanted = self.plan.budget * _FIGURES_SHARE / (self._run_cost * len(self._kinds))
        return max(1, min(_MAX_FIGURE_RUNS, int(wanted)))

    def _runs_left(self) -> int:
        """For the search."""
        if self._stop.is_set():
            return 0
        left = self.plan.budget - self.elapsed
        return max(0, int(left / self._run_cost) - self._figure_loops * len(self._kinds))

    def _round(self, candidates: list[Candidate], buffers: dict[Pages, AlignedBuffer]) -> Round | None:
        results = {}
        for candidate in candidates:
            run = self._measure(candidate, Mode.DUPLEX, None, buffers)
            if run is None:
                return None
            results[candidate] = sum(balanced(run, number) for number in range(len(run.paths)))
        return results

    def _measure(
        self,
        candidate: Candidate,
        mode: Mode,
        only: int | None,
        buffers: dict[Pages, AlignedBuffer],
    ) -> Run | None:
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            rig = self.session.open_rig(
                stack, _setting(candidate), backend=candidate.backend, buffers=buffers
            )
            run = self.session.run(rig, mode, only=only)
            self._written_bytes += rig.engine.stats().written_bytes
        if run is not None:
            self._num_runs += 1
            self._seen.add(candidate)
            self._runs_seconds += time.monotonic() - begin
        return run

    # ---- figures

    def _figures(
        self, candidate: Candidate, buffers: dict[Pages, AlignedBuffer]
    ) -> dict[tuple[Mode, int | None], list[Run]] | None:
        """At least one run of each kind, more as time allows; None when stopped."""
        figures: dict[tuple[Mode, int | None], list[Run]] = {kind: [] for kind in self._kinds}
        for loop in range(_MAX_FIGURE_RUNS):
            if loop and self.elapsed + self._run_cost * len(self._kinds) > self.plan.budget:
                break
            for mode, only in self._kinds:
                run = self._measure(candidate, mode, only, buffers)
                if run is None:
                    return None
                figures[mode, only].append(run)
        return figures

    def _profile(
        self, candidate: Candidate, figures: dict[tuple[Mode, int | None], list[Run]]
    ) -> tuple[Profile, float | None]:
        self._check_moved(figures)
        paths = []
        together = figures[Mode.DUPLEX, None]
        for number, place in enumerate(self.session.places):
            both = [_speed(run, number, Op.READ) + _speed(run, number, Op.WRITE) for run in together]
            alone = figures.get((Mode.DUPLEX, number), together)
            paths.append(
                ProfiledPath(
                    path=str(place.site.path.resolve()),
                    identity=identity_of(place.site),
                    bandwidth=PathBandwidth(
                        _median(figures[Mode.READ, number], number, Op.READ),
                        _median(figures[Mode.WRITE, number], number, Op.WRITE),
                        _median(together, number, Op.READ),
                        _median(together, number, Op.WRITE),
                    ),
                    alone_gb_per_s=statistics.median(balanced(run, number) for run in alone),
                    spread=(min(both), max(both)),
                )
            )
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        profile = Profile(tuple(paths), candidate, date, platform.release())
        if len(paths) == 1:
            return profile, None
        sums = (each.bandwidth.balanced_gb_per_s for each in paths)
        return profile, sum(sums) / sum(each.alone_gb_per_s for each in paths)

    def _check_moved(self, figures: dict[tuple[Mode, int | None], list[Run]]) -> None:
        """A drive that ended no block in half of the runs has no bandwidth to keep."""
        for (mode, only), runs in figures.items():
            for number, place in enumerate(self.session.places):
                if only not in (None, number):
                    continue
                if not all(
                    statistics.median(_speed(run, number, op) for run in runs) for op in mode.ops
                ):
                    raise ConfigError(
                        f"{place.site.path} ended no block in {mode.value} runs of "
                        f"{self.plan.run_seconds:g} s, so that its bandwidth is not known: give a "
                        f"longer --budget than {self.plan.budget:g} s (60 s: runs of 0.5 s)"
                    )

    def say(self, text: str) -> None:
        """For the session: what begins."""
        self._watcher.phase(text)

    def tick(self) -> None:
        """For the session: time passes."""
        self._watcher.progress(min(self.elapsed, self.plan.budget))


class _Relay:
    """The session's observer, which counts in runs."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner

    def phase(self, text: str) -> None:
        self._tuner.say(text)

    def progress(self, runs: float) -> None:
        self._tuner.tick()


def _setting(candidate: Candidate) -> Setting:
    return Setting(candidate.chunk_bytes, candidate.read_depth, 1, candidate.write_depth)


def _extremes(space: Space) -> Iterator[Candidate]:
    """Among these is what needs the most buffers: depths that are equal."""
    yield space.default
    for chunk, depth in itertools.product(CHUNKS, DEPTHS):
        candidate = dataclasses.replace(
            space.default, chunk_bytes=chunk, read_depth=depth, write_depth=depth
        )
        if space.allows(candidate):
            yield candidate


def _speed(run: Run, number: int, op: Op) -> float:
    return run.paths[number][op].gb_per_s


def _median(runs: list[Run], number: int, op: Op) -> float:
    return statistics.median(_speed(run, number, op) for run in runs)
