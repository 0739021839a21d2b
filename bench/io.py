"""What the I/O engine reaches on a drive: read, write and both at once, against fio.

    python bench/io.py --directory /mnt/nvme --against fio --json

Both sides use the same warmed file (every extent written before), O_DIRECT and runs of equal
length, one after the other in pairs; the ratios are medians over the pairs. fio gets the best of a
small grid of engines, block sizes, depths and buffer memory, found in a calibration pass before.
Huge pages for fio's buffers are reserved while the benchmark runs, where the user may do that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiermem.io as tio
from tiermem.types import format_bytes

GIB = 1 << 30
REQUEST_BYTES = 32 << 20
WINDOW = 4  # requests queued per stream: the engine always finds the next one
MODES = ("read", "write", "duplex")
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGES_NEEDED = 160  # two jobs of depth 32 at 4 MiB, and some


@dataclass(frozen=True, slots=True)
class Figures:
    """One timed run. GB/s are decimal; CPU is user and system time of the whole process."""

    read_gb_per_s: float
    write_gb_per_s: float
    seconds: float
    cpu_s_per_gib: float
    direct: bool
    backend: str

    @property
    def gb_per_s(self) -> float:
        return self.read_gb_per_s + self.write_gb_per_s


class Stream:
    """Transfers one after the other, round and round a part of a file."""

    def __init__(self, bench: Bench, op: tio.Op, begin: int, end: int) -> None:
        self.bench, self.op, self.begin, self.end = bench, op, begin, end
        self.position = begin
        self.base = bench.buffer.address + int(op) * WINDOW * REQUEST_BYTES
        self.number = 0  # requests submitted
        self.waiting: deque[tio.Request] = deque()

    def top_up(self) -> None:
        while self.waiting and self.waiting[0].done():
            self.waiting.popleft().wait()
        while len(self.waiting) < WINDOW:
            address = self.base + self.number % WINDOW * REQUEST_BYTES
            length = min(REQUEST_BYTES, self.end - self.position)
            bench = self.bench
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
        self, directory: str | os.PathLike[str], size: int, backend: str, options: tio.QueueOptions
    ) -> None:
        self._cleanup = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="tiermem-bench-", dir=directory)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self.size = size // (2 * REQUEST_BYTES) * 2 * REQUEST_BYTES
            self.file = stack.enter_context(tio.StorageFile.create(Path(folder) / "data", self.size))
            self.buffer = stack.enter_context(tio.aligned_buffer(2 * WINDOW * REQUEST_BYTES))
            self.engine = tio.open_engine(backend, folder)
            stack.callback(self.engine.close)
            self.engine.register(self.buffer.address, self.buffer.nbytes)
            self.queue = self.engine.add_queue(options)
            self._warm()
            self._cleanup = stack.pop_all()

    def _warm(self) -> None:
        for op in tio.Op:
            half = WINDOW * REQUEST_BYTES
            with self.buffer.view[op * half : op * half + half] as part:
                block = os.urandom(1 << 20)
                for at in range(0, half, len(block)):
                    part[at : at + len(block)] = block
        stream = Stream(self, tio.Op.WRITE, 0, self.size)
        for _ in range(0, self.size, REQUEST_BYTES):
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


def measure_duplex(
    directory: str | os.PathLike[str],
    *,
    size: int = 2 * GIB,
    seconds: float = 3.0,
    backend: str = "auto",
    options: tio.QueueOptions | None = None,
) -> Figures:
    """Reads and writes at once on a file of ``size`` bytes in ``directory``; a few seconds.

    The floor that a training step's I/O is held against, measured in the same run.
    """
    with Bench(directory, size, backend, options or tio.QueueOptions()) as bench:
        bench.run("duplex", seconds / 6)
        return bench.run("duplex", seconds)


# ---- fio -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FioSetting:
    ioengine: str
    block: str
    depth: int
    memory: str = "malloc"

    def __str__(self) -> str:
        return f"{self.ioengine} bs={self.block} iodepth={self.depth} iomem={self.memory}"


def fio_grid(calibrate_fully: bool) -> Iterator[FioSetting]:
    for ioengine in ("libaio", "io_uring"):
        for block in ("256k", "1M", "4M") if calibrate_fully else ("1M",):
            for depth in (8, 32):
                yield FioSetting(ioengine, block, depth)


def run_fio(bench: Bench, mode: str, setting: FioSetting, seconds: float) -> Figures | None:
    """One run of fio on the same file; None when this fio or kernel refuses the setting."""
    half = bench.size // 2
    common = [
        "fio",
        "--output-format=json",
        f"--filename={bench.file.path}",
        f"--direct={int(bench.file.direct)}",
        f"--ioengine={setting.ioengine}",
        f"--bs={setting.block}",
        f"--iodepth={setting.depth}",
        f"--iomem={setting.memory}",
        "--time_based",
        f"--runtime={seconds}",
        "--invalidate=0",
        "--allow_file_create=0",
        "--randrepeat=0",
    ]
    parts = {
        "read": [("read", 0, bench.size)],
        "write": [("write", 0, bench.size)],
        "duplex": [("read", 0, half), ("write", half, half)],
    }[mode]
    for kind, offset, size in parts:
        common += [f"--name={kind}", f"--rw={kind}", f"--offset={offset}", f"--size={size}"]
    result = subprocess.run(common, capture_output=True, text=True, check=False)
    if result.returncode:
        return None
    jobs = json.loads(result.stdout[result.stdout.index("{") :])["jobs"]
    if any(job["error"] for job in jobs):
        return None
    read = sum(job["read"]["bw_bytes"] for job in jobs)
    written = sum(job["write"]["bw_bytes"] for job in jobs)
    moved = sum(job["read"]["io_bytes"] + job["write"]["io_bytes"] for job in jobs)
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in jobs)
    return Figures(
        read / 1e9, written / 1e9, seconds, cpu / (moved / GIB), bench.file.direct, setting.ioengine
    )


def best_fio(bench: Bench, mode: str, huge: bool, seconds: float, full: bool) -> FioSetting:
    """The grid once, with huge pages where there are some; then the best few again."""
    found: dict[FioSetting, list[float]] = {}

    def attempt(setting: FioSetting) -> None:
        figures = run_fio(bench, mode, setting, seconds)
        if figures is not None:
            found.setdefault(setting, []).append(figures.gb_per_s)

    def mean(setting: FioSetting) -> float:
        return statistics.mean(found[setting])

    for setting in fio_grid(full):
        attempt(dataclasses.replace(setting, memory="shmhuge") if huge else setting)
    leading = sorted(found, key=mean, reverse=True)[:3]
    for setting in leading if found else fio_grid(full):
        attempt(setting)
    if not found:
        raise SystemExit("fio runs in no setting on this file; use --against none")
    if leading and huge:
        attempt(dataclasses.replace(leading[0], memory="malloc"))
    return max(found, key=mean)


@contextlib.contextmanager
def reserved_huge_pages() -> Iterator[bool]:
    """Whether fio can have huge pages; what was reserved for it is given back."""
    before = 0
    try:
        before = int(HUGE_PAGES.read_text())
        if before < HUGE_PAGES_NEEDED:
            HUGE_PAGES.write_text(str(HUGE_PAGES_NEEDED))
        enough = int(HUGE_PAGES.read_text()) >= HUGE_PAGES_NEEDED
    except OSError:
        enough = before >= HUGE_PAGES_NEEDED
    try:
        yield enough
    finally:
        if before < HUGE_PAGES_NEEDED:
            with contextlib.suppress(OSError):
                HUGE_PAGES.write_text(str(before))


# ---- report ----------------------------------------------------------------------------------


def filesystem_of(directory: str) -> str:
    best, kind = "", "unknown"
    target = os.path.realpath(directory)
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, point, name, *_ = line.split()
            inside = target == point or target.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, name
    return kind


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


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


def compare(bench: Bench, arguments: argparse.Namespace, log: object) -> dict[str, object]:
    say = print if log else (lambda *_: None)
    against_fio = arguments.against == "fio"
    ours: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    theirs: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    settings: dict[str, FioSetting] = {}
    with reserved_huge_pages() if against_fio else contextlib.nullcontext(False) as huge:
        for mode in MODES if against_fio else ():
            full = not arguments.quick
            settings[mode] = best_fio(bench, mode, huge, arguments.seconds / 2, full)
            say(f"fio's best for {mode}: {settings[mode]}")
        for pair in range(arguments.pairs):
            for mode in MODES:
                sides = ["ours", "fio"] if pair % 2 == 0 else ["fio", "ours"]
                for side in sides if against_fio else ["ours"]:
                    if side == "ours":
                        figures = bench.run(mode, arguments.seconds)
                        ours[mode].append(figures)
                    else:
                        result = run_fio(bench, mode, settings[mode], arguments.seconds)
                        if result is None:
                            raise SystemExit(f"fio failed with {settings[mode]}")
                        figures = result
                        theirs[mode].append(figures)
                    say(
                        f"pair {pair + 1} {mode:6} {side:4} read {figures.read_gb_per_s:5.2f} "
                        f"write {figures.write_gb_per_s:5.2f} GB/s, "
                        f"{figures.cpu_s_per_gib * 1000:5.1f} ms CPU per GiB"
                    )
    report = summary(ours, theirs)
    report["fio_settings"] = {mode: str(setting) for mode, setting in settings.items()}
    return report


def parse_size(text: str) -> int:
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    digits = text.lower().rstrip("ib")
    unit = units.get(digits[-1:], 1)
    return int(float(digits.rstrip("kmg")) * unit)


def parse_arguments() -> argparse.Namespace:
    defaults = tio.QueueOptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", choices=("fio", "none"), default="fio")
    parser.add_argument("--directory", default=".", help="a directory on the drive to measure")
    parser.add_argument("--size", type=parse_size, default=2 * GIB, help="of the file, e.g. 2GiB")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--backend", default="auto", help="auto, libaio or threads")
    parser.add_argument("--chunk", type=parse_size, default=defaults.chunk_bytes)
    parser.add_argument("--read-depth", type=int, default=defaults.read_depth)
    parser.add_argument("--write-depth", type=int, default=defaults.write_depth)
    parser.add_argument("--quick", action="store_true", help="calibrate fio at 1 MiB blocks only")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    if arguments.size < 4 * REQUEST_BYTES or arguments.pairs < 1 or arguments.seconds <= 0:
        parser.error("--size is at least 128MiB, --pairs at least 1, --seconds above 0")
    if arguments.against == "fio" and shutil.which("fio") is None:
        print("fio is not installed: measuring ours only", file=sys.stderr)
        arguments.against = "none"
    return arguments


def fio_version() -> str:
    return subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=False
    ).stdout.strip()


def main() -> None:
    arguments = parse_arguments()
    # SIGTERM unwinds like Ctrl-C, so that the file goes in every case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = tio.QueueOptions(arguments.chunk, arguments.read_depth, arguments.write_depth)
    with Bench(arguments.directory, arguments.size, arguments.backend, options) as bench:
        report = compare(bench, arguments, not arguments.json)
        report |= {
            "direct": bench.file.direct,
            "backend": bench.engine.name,
            "backend_reason": bench.engine.reason,
            "size": format_bytes(bench.size),
        }
    report |= {
        "options": dataclasses.asdict(options),
        "pairs": arguments.pairs,
        "seconds": arguments.seconds,
        "filesystem": filesystem_of(arguments.directory),
        "kernel": platform.release(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "fio": fio_version() if arguments.against == "fio" else None,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
