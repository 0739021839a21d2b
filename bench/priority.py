"""How long a demand read takes while the queue is full of write-back and prefetch.

    python bench/priority.py --directory /mnt/nvme --json

Two background streams keep 128 MiB queued each on one path queue: writes alone (a write-back), or
writes and reads (write-back and prefetch). Meanwhile one read after the other, of random blocks
elsewhere in the file, is timed from submission to the end of its wait. Runs with Priority.DEMAND and
with the background's own priority take turns; so do runs with nothing in the background, which are
the floor. Percentiles are over all reads of a kind; the spread is that of the runs' own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arguments as argument
from machine import facts, unwind_on_sigterm

import tiermem.io as tio
from tiermem.benchmark.plan import WINDOW
from tiermem.benchmark.streams import Lane, Stream, finish
from tiermem.store.mounts import find_mount
from tiermem.types import ALIGNMENT, format_bytes

REQUEST_BYTES = 32 << 20
LOADS = {"write": (tio.Op.WRITE,), "write_and_prefetch": (tio.Op.WRITE, tio.Op.READ)}
PAUSE_S = 2e-3  # up to so long between two reads, so that they do not fall in step with the load


class Rig:
    """A file, written once, and an engine with one queue. Quarters: demand, prefetch, write-back."""

    def __init__(self, arguments: argparse.Namespace, options: tio.QueueOptions) -> None:
        self.quarter = arguments.size // 4 // REQUEST_BYTES * REQUEST_BYTES
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="tiermem-bench-", dir=arguments.directory)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self.file = stack.enter_context(
                tio.StorageFile.create(Path(folder) / "data", 4 * self.quarter)
            )
            self.buffer = stack.enter_context(tio.aligned_buffer((2 * WINDOW + 1) * REQUEST_BYTES))
            self.engine = tio.open_engine(arguments.backend, folder)
            stack.callback(self.engine.close)
            self.engine.register(self.buffer.address, self.buffer.nbytes)
            self.queue = self.engine.add_queue(options)
            with self.buffer.view as view:
                view[:] = os.urandom(1 << 20) * (self.buffer.nbytes >> 20)
            whole = Stream(self._lane(tio.Op.WRITE, 0, 4 * self.quarter), once=True)
            whole.start()
            whole.join()
            finish([whole])
            self._cleanup = stack.pop_all()

    def _lane(self, op: tio.Op, begin: int, end: int) -> Lane:
        at = int(op) * WINDOW * REQUEST_BYTES
        return Lane(self.engine, self.queue, self.file, op, begin, end, self.buffer, at, REQUEST_BYTES)

    @contextlib.contextmanager
    def load(self, ops: tuple[tio.Op, ...]) -> Iterator[None]:
        """The background, in its steady state."""
        places = {tio.Op.READ: (1, 2), tio.Op.WRITE: (2, 4)}
        streams = [
            Stream(self._lane(op, places[op][0] * self.quarter, places[op][1] * self.quarter))
            for op in ops
        ]
        for stream in streams:
            stream.start()
        time.sleep(0.1 if streams else 0.0)
        try:
            yield
        finally:
            finish(streams)

    def demand(self, nbytes: int, priority: tio.Priority, choose: random.Random) -> float:
        """Seconds that one read took."""
        offset = choose.randrange(0, self.quarter - nbytes, ALIGNMENT)
        address = self.buffer.address + 2 * WINDOW * REQUEST_BYTES
        start = time.perf_counter()
        self.engine.submit(
            self.queue, tio.Op.READ, self.file.fd, offset, address, nbytes, priority=priority
        ).wait()
        return time.perf_counter() - start

    def close(self) -> None:
        self._cleanup.close()


PERCENTILES = (("p50", 50.0), ("p99", 99.0), ("p99_9", 99.9))


@dataclass
class Sample:
    """Seconds of the reads of one kind, run by run."""

    runs: list[list[float]] = field(default_factory=list)

    def percentile_ms(self, percent: float) -> float:
        return round(percentile([one for run in self.runs for one in run], percent) * 1e3, 3)

    def spread_ms(self, percent: float) -> list[float]:
        values = sorted(percentile(run, percent) * 1e3 for run in self.runs)
        return [round(one, 3) for one in (values[0], statistics.median(values), values[-1])]


def percentile(values: list[float], percent: float) -> float:
    """The value that ``percent`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def measure(rig: Rig, nbytes: int, arguments: argparse.Namespace) -> dict[str, object]:
    """All kinds of run for reads of ``nbytes``, in turns, forwards and backwards."""
    kinds: list[tuple[str, tuple[tio.Op, ...], tio.Priority]] = [("alone", (), tio.Priority.DEMAND)]
    for load, ops in LOADS.items():
        kinds.append((f"{load} with", ops, tio.Priority.DEMAND))
        kinds.append((f"{load} without", ops, tio.Priority.BACKGROUND))
    samples = {name: Sample() for name, _, _ in kinds}
    choose = random.Random(0)
    for pair in range(arguments.pairs):
        for name, ops, priority in kinds if pair % 2 == 0 else kinds[::-1]:
            times: list[float] = []
            with rig.load(ops):
                end = time.perf_counter() + arguments.seconds
                while time.perf_counter() < end:
                    times.append(rig.demand(nbytes, priority, choose))
                    time.sleep(choose.random() * PAUSE_S)
            samples[name].runs.append(times)
            if not arguments.json:
                p99 = percentile(times, 99) * 1e3
                print(f"{format_bytes(nbytes)} {name:26} {len(times):5} reads, p99 {p99:7.2f} ms")
    return summary(samples)


def summary(samples: dict[str, Sample]) -> dict[str, object]:
    report: dict[str, object] = {
        f"{name}_alone_ms": samples["alone"].percentile_ms(percent) for name, percent in PERCENTILES
    }
    for load in LOADS:
        part: dict[str, object] = {}
        for side in ("with", "without"):
            sample = samples[f"{load} {side}"]
            for name, percent in PERCENTILES:
                part[f"{name}_{side}_ms"] = sample.percentile_ms(percent)
            part[f"p99_{side}_ms_spread"] = sample.spread_ms(99)
            part[f"reads_{side}"] = sum(map(len, sample.runs))
        for name, percent in PERCENTILES:
            behind = samples[f"{load} without"].percentile_ms(percent)
            part[f"{name}_ratio"] = round(samples[f"{load} with"].percentile_ms(percent) / behind, 4)
        report[load] = part
    return report


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--directory", default=".", help="a directory on the drive to measure")
    parser.add_argument("--size", type=argument.size, default=1 << 30, help="of the file, e.g. 2GiB")
    parser.add_argument("--reads", type=argument.size, nargs="+", default=[2 << 20, 64 << 10])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each run")
    argument.add_engine(parser)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    if arguments.size < 8 * WINDOW * REQUEST_BYTES or arguments.pairs < 1 or arguments.seconds <= 0:
        parser.error("--size is at least 1GiB, --pairs at least 1, --seconds above 0")
    if any(not 0 < size <= REQUEST_BYTES or size % ALIGNMENT for size in arguments.reads):
        parser.error(f"--reads are multiples of {ALIGNMENT} up to {format_bytes(REQUEST_BYTES)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    unwind_on_sigterm()
    options = argument.queue_options(arguments)
    with contextlib.closing(Rig(arguments, options)) as rig:
        report: dict[str, object] = {
            format_bytes(nbytes): measure(rig, nbytes, arguments) for nbytes in arguments.reads
        }
        report |= {
            "queued_bytes_per_direction": WINDOW * REQUEST_BYTES,
            "chunk_bytes": options.chunk_bytes,
            "depths": [options.read_depth, options.write_depth],
            "backend": rig.engine.name,
            "direct": rig.file.direct,
        }
    report |= {
        "pairs": arguments.pairs,
        "seconds": arguments.seconds,
        "filesystem": find_mount(Path(arguments.directory)).filesystem,
        **facts(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
