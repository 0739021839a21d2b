"""fio on a file of bench/io.py: its best setting, and figures of the same kind as ours."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

GIB = 1 << 30
MODES = ("read", "write", "duplex")
ENGINES = (("libaio", False), ("io_uring", False), ("io_uring", True))  # and fixed, see Setting
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGES_NEEDED = 160  # of 2 MiB: two jobs of depth 32 at 4 MiB, and some


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


@dataclass(frozen=True, slots=True)
class Target:
    """A file that is there, wholly written."""

    path: str
    size: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Setting:
    ioengine: str
    fixed: bool  # registered buffers and files
    block: str  # or a range of them, "4k-64k"
    depth: int
    memory: str

    def __str__(self) -> str:
        fixed = " fixedbufs registerfiles" if self.fixed else ""
        return f"{self.ioengine}{fixed} bs={self.block} iodepth={self.depth} iomem={self.memory}"


def grid(*, full: bool, huge: bool) -> list[Setting]:
    """All that is tried: every combination, with fio's default memory and with huge pages."""
    blocks = ("256k", "1M", "4M") if full else ("1M",)
    memories = ("malloc", "mmaphuge") if huge else ("malloc",)
    return [
        Setting(*engine, block, depth, memory)
        for engine, block, depth, memory in product(ENGINES, blocks, (8, 32), memories)
    ]


def run(target: Target, mode: str, setting: Setting, seconds: float) -> Figures | None:
    """One run on ``target``: ``duplex``, or what fio calls ``rw``; None when it refuses the setting."""
    half = target.size // 2
    command = [
        "fio",
        "--output-format=json",
        f"--filename={target.path}",
        f"--direct={int(target.direct)}",
        f"--ioengine={setting.ioengine}",
        f"--{'bsrange' if '-' in setting.block else 'bs'}={setting.block}",
        f"--iodepth={setting.depth}",
        f"--iomem={setting.memory}",
        "--time_based",
        f"--runtime={seconds}",
        "--invalidate=0",
        "--allow_file_create=0",
        "--randrepeat=0",
        "--scramble_buffers=0",  # or it changes what it writes before each write: 30 ms CPU per GiB
    ]
    if setting.fixed:
        command += ["--fixedbufs=1", "--registerfiles=1"]
    parts = [(mode, 0, target.size)]
    if mode == "duplex":
        parts = [("read", 0, half), ("write", half, half)]
    for kind, offset, size in parts:
        command += [f"--name={kind}", f"--rw={kind}", f"--offset={offset}", f"--size={size}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
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
        read / 1e9, written / 1e9, seconds, cpu / (moved / GIB), target.direct, setting.ioengine
    )


def best(target: Target, mode: str, settings: list[Setting], seconds: float) -> Setting:
    """All settings once, then the leading few again; the one with the highest mean."""
    found: dict[Setting, list[float]] = {}

    def attempt(setting: Setting) -> None:
        figures = run(target, mode, setting, seconds)
        if figures is not None:
            found.setdefault(setting, []).append(figures.gb_per_s)

    def mean(setting: Setting) -> float:
        return statistics.mean(found[setting])

    for setting in settings:
        attempt(setting)
    if not found:
        raise SystemExit("fio runs in no setting on this file; use --against none")
    leading = sorted(found, key=mean, reverse=True)[:3]
    for setting in leading * 2:
        attempt(setting)
    return max(leading, key=mean)


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


def version() -> str:
    return subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=False
    ).stdout.strip()
