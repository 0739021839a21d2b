"""What the I/O engine reaches on a drive: read, write and both at once, against fio.

    python bench/io.py --directory /mnt/nvme --against fio --json

Both sides use the same warmed file (every extent written before), O_DIRECT and runs of equal
length, one after the other in pairs; the ratios are medians over the pairs. fio gets the best of a
grid of engines, block sizes, depths and buffer memory, found in a calibration pass before; see
io_fio.py. ``--fio same`` gives it our block size and depth instead, to compare processor time.
``--against backends`` compares our own native backends with each other instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arguments as argument
import io_fio
from io_fio import GIB, MODES, Figures
from machine import facts, unwind_on_sigterm

import tiermem.io as tio
from tiermem.store.mounts import find_mount
from tiermem.types import format_bytes

WINDOW = 2  # requests queued per stream: the engine always finds the next one
NATIVE = [backend for backend in tio.BACKENDS if backend != "threads"]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A file of ``file_bytes``, moved by requests of ``request_bytes``."""

    file_bytes: int
    request_bytes: int


class Stream:
    """Transfers one after the other, round and round a part of a file."""

    def __init__(self, bench: Bench, op: tio.Op, begin: int, end: int) -> None:
        self.bench, self.op, self.begin, self.end = bench, op, begin, end
        self.position = begin
        self.base = bench.buffer.address + int(op) * WINDOW * bench.request_bytes
        self.number = 0  # requests submitted
        self.waiting: deque[tio.Request] = deque()

    def top_up(self) -> None:
        while self.waiting and self.waiting[0].done():
            self.waiting.popleft().wait()
        while len(self.waiting) < WINDOW:
            bench = self.bench
            address = self.base + self.number % WINDOW * bench.request_bytes
            length = min(bench.request_bytes, self.end - self.position)
            self.waiting.append(
                bench.engine.submit(bench.queue, self.op, bench.file.fd, self.position, address, length)
            )
            self.number += 1
            self.position += length
            if self.position == self.end:
                self.position = self.begin

    @property
    def moved(self) -> int:
        return self.number - len(self.waiting)

    def drain(self) -> None:
        while self.waiting:
            self.waiting.popleft().wait()


class Bench:
    """A warmed file, an engine with one queue and buffers on huge pages, gone after `close`."""

    def __init__(
        self, directory: str | os.PathLike[str], work: Work, backend: str, options: tio.QueueOptions
    ) -> None:
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="tiermem-bench-", dir=directory)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self.request_bytes = work.request_bytes
            self.size = work.file_bytes // (2 * self.request_bytes) * 2 * self.request_bytes
            self.file = stack.enter_context(tio.StorageFile.create(Path(folder) / "data", self.size))
            self.buffer = stack.enter_context(tio.aligned_buffer(2 * WINDOW * self.request_bytes))
            self._engines: dict[str, tuple[tio.Engine, int]] = {}
            stack.callback(self._close_engines)
            self.options = options
            self.folder = folder
            self.use(backend)
            self._warm()
            self._cleanup = stack.pop_all()

    def use(self, backend: str) -> None:
        """Runs go through this backend from now on."""
        if backend not in self._engines:
            engine = tio.open_engine(backend, self.folder)
            self._engines[backend] = engine, -1
            engine.register(self.buffer.address, self.buffer.nbytes)
            self._engines[backend] = engine, engine.add_queue(self.options)
        self.engine, self.queue = self._engines[backend]

    def _close_engines(self) -> None:
        for engine, _ in self._engines.values():
            engine.close()

    def _warm(self) -> None:
        for op in tio.Op:
            half = WINDOW * self.request_bytes
            with self.buffer.view[op * half : op * half + half] as part:
                block = os.urandom(1 << 20)
                for at in range(0, half, len(block)):
                    part[at : at + len(block)] = block
        stream = Stream(self, tio.Op.WRITE, 0, self.size)
        for _ in range(0, self.size, self.request_bytes):
            stream.top_up()
            stream.waiting[0].wait()
        stream.drain()

    def run(self, mode: str, seconds: float) -> Figures:
        """Runs ``mode`` (read, write, duplex) for ``seconds``."""
        half = self.size // 2
        streams = {
            "read": [(tio.Op.READ, 0, self.size)],
            "write": [(tio.Op.WRITE, 0, self.size)],
            "duplex": [(tio.Op.READ, 0, half), (tio.Op.WRITE, half, self.size)],
        }[mode]
        running = [Stream(self, *arguments) for arguments in streams]
        before, cpu = self.engine.stats(), cpu_seconds()
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            for stream in running:
                stream.top_up()
            # The stream that is behind: the other's window lasts until this request is done.
            min(running, key=lambda stream: stream.moved).waiting[0].wait()
        after, cpu = self.engine.stats(), cpu_seconds() - cpu
        for stream in running:
            stream.drain()
        read, written = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
        return Figures(
            read_gb_per_s=read / elapsed / 1e9,
            write_gb_per_s=written / elapsed / 1e9,
            seconds=elapsed,
            cpu_s_per_gib=cpu / ((read + written) / GIB),
            direct=self.file.direct,
            backend=self.engine.name,
        )

    def close(self) -> None:
        self._cleanup.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- report ----------------------------------------------------------------------------------


def spread(values: list[float]) -> list[float]:
    return [round(min(values), 4), round(statistics.median(values), 4), round(max(values), 4)]


def summary(ours: dict[str, list[Figures]], theirs: dict[str, list[Figures]]) -> dict[str, object]:
    """Medians, and [lowest, median, highest] of each."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    report: dict[str, object] = {}
    for side, prefix in ((ours, ""), (theirs, "fio_")):
        if not side[MODES[0]]:
            continue
        report[f"{prefix}read_gb_per_s"] = median([run.read_gb_per_s for run in side["read"]])
        report[f"{prefix}write_gb_per_s"] = median([run.write_gb_per_s for run in side["write"]])
        report[f"{prefix}duplex_read_gb_per_s"] = median([r.read_gb_per_s for r in side["duplex"]])
        report[f"{prefix}duplex_write_gb_per_s"] = median([r.write_gb_per_s for r in side["duplex"]])
        report[f"{prefix}cpu_s_per_gib"] = {
            mode: median([run.cpu_s_per_gib for run in runs]) for mode, runs in side.items()
        }
        report[f"{prefix}gb_per_s_spread"] = {
            mode: spread([run.gb_per_s for run in runs]) for mode, runs in side.items()
        }
    for mode in MODES:
        if theirs[mode]:
            pairs = list(zip(ours[mode], theirs[mode], strict=True))
            ratios = [mine.gb_per_s / other.gb_per_s for mine, other in pairs]
            report[f"{mode}_ratio"] = median(ratios)
            report[f"{mode}_ratio_spread"] = spread(ratios)
            cpu = [mine.cpu_s_per_gib / other.cpu_s_per_gib for mine, other in pairs]
            report[f"{mode}_cpu_ratio"] = median(cpu)
    return report


def fio_setting(
    target: io_fio.Target, mode: str, arguments: argparse.Namespace, huge: bool
) -> io_fio.Setting:
    if arguments.fio == "same":
        depth = max(arguments.read_depth, arguments.write_depth)
        memory = "mmaphuge" if huge else "malloc"
        return io_fio.Setting("io_uring", True, str(arguments.chunk), depth, memory)
    grid = io_fio.grid(full=not arguments.quick, huge=huge)
    return io_fio.best(target, mode, grid, arguments.seconds / 2)


def compare(bench: Bench, arguments: argparse.Namespace, log: object) -> dict[str, object]:
    say = print if log else (lambda *_: None)
    against_fio = arguments.against == "fio"
    ours: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    theirs: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    settings: dict[str, io_fio.Setting] = {}
    target = io_fio.Target(bench.file.path, bench.size, bench.file.direct)
    with io_fio.reserved_huge_pages() if against_fio else contextlib.nullcontext(False) as huge:
        for mode in MODES if against_fio else ():
            settings[mode] = fio_setting(target, mode, arguments, huge)
            say(f"fio for {mode}: {settings[mode]}")
        for pair in range(arguments.pairs):
            for mode in MODES:
                sides = ["ours", "fio"] if pair % 2 == 0 else ["fio", "ours"]
                for side in sides if against_fio else ["ours"]:
                    if side == "ours":
                        figures = bench.run(mode, arguments.seconds)
                        ours[mode].append(figures)
                    else:
                        result = io_fio.run(target, mode, settings[mode], arguments.seconds)
                        if result is None:
                            raise SystemExit(f"fio failed with {settings[mode]}")
                        figures = result
                        theirs[mode].append(figures)
                    say(f"pair {pair + 1} {mode:6} {side:4} {line(figures)}")
    report = summary(ours, theirs)
    report["fio_settings"] = {mode: str(setting) for mode, setting in settings.items()}
    return report


def compare_backends(bench: Bench, arguments: argparse.Namespace, log: object) -> dict[str, object]:
    """Our native backends in turn, forwards and backwards; medians and [lowest, median, highest]."""
    probed = tio.probe_backends(arguments.directory)
    working = [backend for backend in NATIVE if probed[backend] == "works"]
    runs: dict[str, dict[str, list[Figures]]] = {b: {mode: [] for mode in MODES} for b in working}
    for pair in range(arguments.pairs):
        for mode in MODES:
            for backend in working if pair % 2 == 0 else working[::-1]:
                bench.use(backend)
                figures = bench.run(mode, arguments.seconds)
                runs[backend][mode].append(figures)
                if log:
                    print(f"pair {pair + 1} {mode:6} {backend:14} {line(figures)}")
    report: dict[str, object] = {"probed": probed}
    for backend in working:
        bench.use(backend)
        report[backend] = summary(runs[backend], {mode: [] for mode in MODES}) | {
            "registration": bench.engine.registration
        }
    return report


def line(figures: Figures) -> str:
    return (
        f"read {figures.read_gb_per_s:5.2f} write {figures.write_gb_per_s:5.2f} GB/s, "
        f"{figures.cpu_s_per_gib * 1000:5.1f} ms CPU per GiB"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", choices=("fio", "backends", "none"), default="fio")
    parser.add_argument("--directory", default=".", help="a directory on the drive to measure")
    parser.add_argument("--size", type=argument.size, default=2 * GIB, help="of the file, e.g. 2GiB")
    parser.add_argument(
        "--request",
        type=argument.size,
        default=128 << 20,
        help="bytes per request; the smaller, the more of Python is in the CPU figures (fio has none)",
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    argument.add_engine(parser)
    parser.add_argument(
        "--fio",
        choices=("best", "same"),
        default="best",
        help="best: its fastest setting; same: io_uring with our blocks and depth, to compare CPU",
    )
    parser.add_argument("--quick", action="store_true", help="calibrate fio at 1 MiB blocks only")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    if arguments.request < 4096 or arguments.request % 4096:
        parser.error("--request is a multiple of 4096 bytes")
    if arguments.size < 4 * arguments.request or arguments.pairs < 1 or arguments.seconds <= 0:
        parser.error("--size is at least 4 requests, --pairs at least 1, --seconds above 0")
    if arguments.against == "fio" and shutil.which("fio") is None:
        print("fio is not installed: measuring ours only", file=sys.stderr)
        arguments.against = "none"
    return arguments


def main() -> None:
    arguments = parse_arguments()
    unwind_on_sigterm()
    options = argument.queue_options(arguments)
    work = Work(arguments.size, arguments.request)
    with Bench(arguments.directory, work, arguments.backend, options) as bench:
        chosen = bench.engine
        action = compare_backends if arguments.against == "backends" else compare
        report = action(bench, arguments, not arguments.json)
        report |= {
            "direct": bench.file.direct,
            "backend": chosen.name,
            "backend_reason": chosen.reason,
            "registration": chosen.registration,
            "size": format_bytes(bench.size),
            "request": format_bytes(bench.request_bytes),
        }
    report |= {
        "options": dataclasses.asdict(options),
        "pairs": arguments.pairs,
        "seconds": arguments.seconds,
        "filesystem": find_mount(Path(arguments.directory)).filesystem,
        **facts(),
        "fio": io_fio.version() if arguments.against == "fio" else None,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
