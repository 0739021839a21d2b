"""A benchmark as it runs: files made and warmed, runs measured, everything removed.

[Note: what is measured] First writes into preallocated extents are slower than later ones, so every
file is written once before. A run starts its streams, lets them fill the queues for a tenth of its
time, and takes the engine's counters twice while they go on: no ramp up or down is in the figures.
Two exceptions: with ``runtime`` 0 a run is one pass, taken whole; and a run that writes through the
page cache ends with its flush, whose time counts.

[Note: order] Within one setting the loops go over kinds of pages and modes, so that a change of the
machine in the meantime touches all of them and ratios between them are taken inside one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from tiermem.benchmark import cautions
from tiermem.benchmark.figures import Result, Run
from tiermem.benchmark.place import Place, open_places
from tiermem.benchmark.plan import REQUEST_BYTES, WINDOW, Mode, Pages, Plan, Setting
from tiermem.benchmark.rig import Counters, Rig, difference
from tiermem.benchmark.streams import Lane, Stream, finish
from tiermem.errors import ConfigError
from tiermem.io import AlignedBuffer, Engine, Op, QueueOptions, aligned_buffer, open_engine
from tiermem.types import size_text

_TICK_SECONDS = 0.1
_RAMP_SHARE = 0.1
_RANDOM_BYTES = 1 << 20
_WARM_OPTIONS = QueueOptions(chunk_bytes=2 << 20, read_depth=8, write_depth=8)


class Observer(Protocol):
    """Hears how far a session is."""

    def phase(self, text: str) -> None:
        """What begins now."""

    def progress(self, runs: float) -> None:
        """How many runs are done, with the part of the one in progress."""


class Session:
    """The files of a plan in their places, warmed. A context manager; `close` removes everything.

    ``stop`` may be set at any time by any thread or signal handler: `results` then ends early with
    what was measured. Raises `ConfigError` for what cannot work and `TierIOError` when a transfer or
    the verification fails.
    """

    def __init__(self, plan: Plan, observer: Observer, stop: threading.Event) -> None:
        self.plan = plan
        self.warnings: list[str] = []
        self.reclaimed: tuple[str, ...] = ()
        """Directories of dead runs that were removed first."""
        self._observer = observer
        self._stop = stop
        self._runs_done = 0
        self._places: list[Place] = []
        with contextlib.ExitStack() as stack:
            with self._heard():
                self._places = open_places(stack, plan.paths, plan.size_bytes, plan.direct)
            engine = open_engine(plan.backend, plan.paths[0])
            self.backend, self.reason = engine.name, engine.reason
            with contextlib.closing(engine):
                self._prepare(engine)
            self._stack = stack.pop_all()

    @property
    def places(self) -> list[Place]:
        return self._places

    def close(self) -> None:
        """Removes the files and directories. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def head(self) -> dict[str, Any]:
        """What was measured where and how, as plain values."""
        plan = self.plan
        return {
            "backend": self.backend,
            "backend_reason": self.reason,
            "size_bytes": plan.size_bytes,
            "runtime_seconds": plan.runtime,
            "loops": plan.loops,
            "verify": plan.verify,
            "places": [place.site.fields() | {"o_direct": place.file.direct} for place in self._places],
            "reclaimed": list(self.reclaimed),
        }

    def results(self) -> Iterator[Result]:
        """Measures; the results of one setting after the other."""
        for setting in self.plan.settings():
            if self._stop.is_set():
                return
            yield from self._measure(setting)

    # ---- preparation ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """What the layers below log as warnings is part of this session's warnings."""
        handler = _Collector(self._warn)
        logger = logging.getLogger("tiermem")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _prepare(self, engine: Engine) -> None:
        self.reclaimed = tuple(
            str(place.site.path / name) for place in self._places for name in place.reclaimed
        )
        ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        sites = [place.site for place in self._places]
        for place in self._places:
            path, file = place.site.path, place.file
            for text in cautions.site_cautions(place.site):
                self._warn(text)
            for text in cautions.cache_cautions(path, file.direct, file.nbytes, ram_bytes):
                self._warn(text)
        for text in cautions.shared_cautions(sites):
            self._warn(text)
        for text in cautions.thread_cautions(self.plan, self.backend):
            self._warn(text)
        self._warm(engine)
        for place in self._places:
            if place.is_sparse:
                self._warn(cautions.sparse_caution(place.site.path))
        if self.plan.verify:
            self._warn("--verify makes and checks all contents, whose time is in the figures")

    def _warm(self, engine: Engine) -> None:
        """Writes every file once, all of them at the same time."""
        self._observer.phase("writing the files for the first time")
        if self.plan.verify:
            from tiermem.benchmark.pattern import Pattern

            for place in self._places:
                place.pattern = Pattern(place.file.path, place.file.nbytes, secrets.randbits(64))
        with aligned_buffer(WINDOW * REQUEST_BYTES * len(self._places)) as buffer:
            _fill_randomly(buffer)
            lanes = [
                Lane(
                    engine=engine,
                    queue=engine.add_queue(_WARM_OPTIONS),
                    file=place.file,
                    op=Op.WRITE,
                    begin=0,
                    end=place.file.nbytes,
                    buffer=buffer,
                    at=number * WINDOW * REQUEST_BYTES,
                    request_bytes=REQUEST_BYTES,
                    pattern=place.pattern,
                )
                for number, place in enumerate(self._places)
            ]
            self._pass_once(lanes)
        if self._stop.is_set():
            return
        for place in self._places:
            place.sync()

    def _pass_once(self, lanes: list[Lane]) -> None:
        streams = [Stream(lane, once=True) for lane in lanes]
        try:
            for stream in streams:
                stream.start()
            while not all(stream.join(_TICK_SECONDS) for stream in streams):
                if self._stop.is_set() or any(stream.error for stream in streams):
                    break
        finally:
            finish(streams)

    # ---- one setting ---------------------------------------------------------------------------

    def _measure(self, setting: Setting) -> Iterator[Result]:
        runs: dict[tuple[Pages, Mode], list[Run]] = {}
        with contextlib.ExitStack() as stack:
            rig = self.open_rig(stack, setting)
            for _ in range(self.plan.loops):
                for pages in self.plan.pages:
                    for mode in self.plan.modes:
                        run = self.run(rig, mode, pages)
                        if run is None:
                            break
                        runs.setdefault((pages, mode), []).append(run)
        for (pages, mode), measured in runs.items():
            yield Result(mode, setting, pages, tuple(measured))

    def open_buffers(self, stack: contextlib.ExitStack, nbytes: int) -> dict[Pages, AlignedBuffer]:
        """Filled buffers, which rigs opened later may share one after the other; they close with
        ``stack``."""
        buffers = {}
        for pages in self.plan.pages:
            buffer = stack.enter_context(aligned_buffer(nbytes, huge_pages=pages is Pages.HUGE))
            _fill_randomly(buffer)
            for text in cautions.pages_cautions(pages, buffer):
                self._warn(text)
            buffers[pages] = buffer
        return buffers

    def open_rig(
        self,
        stack: contextlib.ExitStack,
        setting: Setting,
        *,
        backend: str | None = None,
        buffers: dict[Pages, AlignedBuffer] | None = None,
    ) -> Rig:
        """What `run` needs for ``setting``, closed with ``stack``: by default on the plan's backend,
        with buffers of its own. ``buffers`` hold at least `Plan.buffer_bytes` of it."""
        engine = open_engine(backend or self.backend, self.plan.paths[0])
        if buffers is None:
            try:
                buffers = self.open_buffers(stack, self.plan.buffer_bytes(setting))
            except BaseException:
                engine.close()
                raise
        stack.callback(engine.close)  # before the buffers go
        for buffer in buffers.values():
            engine.register(buffer.address, buffer.nbytes)
        options = QueueOptions(
            setting.block_bytes, setting.depth_of(Op.READ), setting.depth_of(Op.WRITE)
        )
        try:
            queues = [[engine.add_queue(options) for _ in range(setting.threads)] for _ in self._places]
        except OSError as error:
            raise ConfigError(f"depth is {setting.depth}: {error.strerror or error}") from error
        return Rig(setting, engine, queues, buffers)

    def _lanes(
        self, rig: Rig, mode: Mode, buffer: AlignedBuffer, only: int | None = None
    ) -> list[Lane]:
        lanes, at = [], 0
        for index, (place, queues) in enumerate(zip(self._places, rig.queues, strict=True)):
            if only not in (None, index):
                continue
            for number, (op, begin, end) in enumerate(self.plan.regions(mode, rig.setting)):
                lane = Lane(
                    engine=rig.engine,
                    queue=queues[number % len(queues)],
                    file=place.file,
                    op=op,
                    begin=begin,
                    end=end,
                    buffer=buffer,
                    at=at,
                    request_bytes=rig.setting.request_bytes(end - begin, op),
                    pattern=place.pattern,
                )
                lanes.append(lane)
                at += WINDOW * lane.request_bytes
        return lanes

    # ---- one run -------------------------------------------------------------------------------

    def run(
        self, rig: Rig, mode: Mode, pages: Pages = Pages.HUGE, *, only: int | None = None
    ) -> Run | None:
        """Measures once, in all paths at the same time or in the one with the number ``only`` (the
        others then have moved nothing). None when it was stopped."""
        if self._stop.is_set():
            return None
        setting = rig.setting
        depths = "/".join(str(depth) for depth in dict.fromkeys(map(setting.depth_of, Op)))
        self._observer.phase(f"{mode.value} {size_text(setting.block_bytes)} depth {depths}")
        for place in self._places:
            if not place.file.direct:
                place.drop_cache()
        lanes = self._lanes(rig, mode, rig.buffers[pages], only)
        streams = [Stream(lane, once=not self.plan.runtime) for lane in lanes]
        try:
            before, after = self._observe(rig, mode, streams)
        finally:
            finish(streams)
        if self._stop.is_set():
            return None
        if self.plan.verify:
            self._read_back(lanes)
        self._runs_done += 1
        self._observer.progress(self._runs_done)
        run = difference(before, after, mode)
        if not self.plan.runtime and all(place.file.direct for place in self._places):
            run = self._timed_by_ends(run, streams, before.seconds)
        return run

    def _timed_by_ends(self, run: Run, streams: list[Stream], begin: float) -> Run:
        """One pass: each path's operation has the time until its own end, not until the slowest's."""
        paths = []
        for place, flows in zip(self._places, run.paths, strict=True):
            here = [stream for stream in streams if stream.lane.file is place.file]
            if not here:
                paths.append(dict(flows))
                continue
            ends = {op: max(s.ended for s in here if s.lane.op is op) for op in flows}
            paths.append(
                {op: dataclasses.replace(flow, seconds=ends[op] - begin) for op, flow in flows.items()}
            )
        return Run(tuple(paths), run.cpu_seconds)

    def _observe(self, rig: Rig, mode: Mode, streams: list[Stream]) -> tuple[Counters, Counters]:
        runtime = self.plan.runtime
        before = rig.count()
        for stream in streams:
            stream.start()
        if runtime:
            self._wait(streams, runtime * _RAMP_SHARE, 0.0)
            before = rig.count()
        self._wait(streams, runtime or float("inf"), runtime)
        buffered = [place for place in self._places if not place.file.direct]
        if buffered and Op.WRITE in mode.ops and not self._stop.is_set():
            finish(streams)
            for place in buffered:
                place.sync()
        return before, rig.count()

    def _wait(self, streams: list[Stream], seconds: float, runtime: float) -> None:
        """Until ``seconds`` have passed, all streams have ended, or one has failed."""
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < seconds and not self._stop.is_set():
            if any(stream.error for stream in streams):
                return
            if runtime:
                self._observer.progress(self._runs_done + min(1.0, elapsed / runtime))
                self._stop.wait(min(_TICK_SECONDS, seconds - elapsed))
            elif all(stream.join(min(_TICK_SECONDS, seconds)) for stream in streams):
                return

    def _read_back(self, lanes: list[Lane]) -> None:
        """What was written is read and checked; what was read was checked already."""
        written = [lane for lane in lanes if lane.op is Op.WRITE]
        if not written:
            return
        self._observer.phase("verifying what was written")
        for place in self._places:
            if not place.file.direct:
                place.drop_cache()
        self._pass_once([dataclasses.replace(lane, op=Op.READ) for lane in written])


class _Collector(logging.Handler):
    def __init__(self, take: Any) -> None:
        super().__init__(logging.WARNING)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record.getMessage())


def _fill_randomly(buffer: AlignedBuffer) -> None:
    """Contents that no drive compresses; every page exists afterwards."""
    block = os.urandom(min(_RANDOM_BYTES, buffer.nbytes))
    with buffer.view as view:
        for at in range(0, buffer.nbytes, len(block)):
            part = min(len(block), buffer.nbytes - at)
            view[at : at + part] = block[:part]
