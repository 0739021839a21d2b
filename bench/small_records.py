"""Thousands of small records, moved through the store and through the bare engine, against fio.

    python bench/small_records.py --directory /mnt/nvme --json

10,000 records of 4, 16 or 64 KiB, or of 4 to 64 KiB mixed (a fixed seed), lie in one file. They are
moved in the order in which they lie there, and shuffled. ``store`` is `TieredStore.read_many` and
`write_many` by batches of 256, ``store_single`` one `read` or `write` for each record, ``engine`` is
`submit_many` by the same batches, without joining neighbours. fio moves the same file in blocks of that
size (or range of sizes), sequentially or at random, with the best of its engines and depths. All take
turns; ratios are medians over the turns, with [lowest, median, highest]. O_DIRECT everywhere, every
byte written before.
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
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arguments as argument
import io_fio
from machine import facts, unwind_on_sigterm

import tiermem.io as tio
from tiermem.memory.arena import Arena
from tiermem.memory.ledger import Ledger
from tiermem.store.mounts import find_mount
from tiermem.store.records import RecordSpan, RecordSpec
from tiermem.store.store import TieredStore
from tiermem.types import ALIGNMENT, Field, Purpose, Tier

T = TypeVar("T")
SIZES = {"4KiB": (4, 4), "16KiB": (16, 16), "64KiB": (64, 64), "mixed": (4, 64)}  # KiB, both inclusive
ORDERS = {"stored": ("read", "write"), "shuffled": ("randread", "randwrite")}  # and fio's words
BATCH = 256
WINDOW = 4  # batches under way
DEPTH = 256
FIO_DEPTHS = (16, 64, 256)

Spans = list[RecordSpan]
Mover = Callable[[tio.Op, Spans], float]
"""Moves all spans once and returns the seconds that it took."""


class Rig:
    """A store of small records, and the same engine with a queue of its own for the bare transfers."""

    def __init__(self, arguments: argparse.Namespace, kib: tuple[int, int]) -> None:
        choose = random.Random(0)
        sizes = [
            choose.randint(*(one // 4 for one in kib)) * ALIGNMENT for _ in range(arguments.records)
        ]
        memory = WINDOW * BATCH * max(sizes)
        with contextlib.ExitStack() as stack:
            self.engine = stack.enter_context(
                contextlib.closing(tio.open_engine(arguments.backend, arguments.directory))
            )
            ledger = Ledger({Tier.HOST: memory})
            arena = Arena(memory, tier=Tier.HOST, ledger=ledger, pin=False)
            stack.callback(arena.close, force=True)
            options = tio.QueueOptions(read_depth=DEPTH, write_depth=DEPTH)
            self.store = stack.enter_context(
                TieredStore(self.engine, arena, paths=[arguments.directory], queue_options=options)
            )
            self.queue = self.engine.add_queue(options)
            block = arena.allocate(memory, Purpose.OPTIMIZER)
            assert block is not None
            block.view()[:] = os.urandom(1 << 20) * (memory >> 20) + bytes(memory % (1 << 20))
            self.engine.register(block.address, memory)
            self.address = block.address
            self.slot_bytes = BATCH * max(sizes)
            self.records = [
                self.store.add(RecordSpec(f"record.{at}", Field.PARAM, size, Tier.NVME))
                for at, size in enumerate(sizes)
            ]
            self.total = sum(sizes)
            (self.path,) = Path(self.store.stats().paths[0].path).glob("gen*.bin")
            self.file = stack.enter_context(tio.StorageFile.open(self.path))
            self.movers: dict[str, Mover] = {
                "store": self.through_store,
                "store_single": self.one_by_one,
                "engine": self.through_engine,
            }
            self._cleanup = stack.pop_all()

    def spans(self, order: str) -> Spans:
        """All records, each with its place in memory: batch after batch round the window."""
        records = list(self.records)
        if order == "shuffled":
            random.Random(1).shuffle(records)
        spans: Spans = []
        for number, batch in enumerate(batched(records)):
            at = self.address + number % WINDOW * self.slot_bytes
            for record in batch:
                spans.append(RecordSpan(record, 0, record.nbytes, at))
                at += record.nbytes
        return spans

    def through_store(self, op: tio.Op, spans: Spans) -> float:
        start = self.store.read_many if op is tio.Op.READ else self.store.write_many
        return timed(start(batch) for batch in batched(spans))

    def one_by_one(self, op: tio.Op, spans: Spans) -> float:
        start = self.store.read if op is tio.Op.READ else self.store.write
        return timed([start(*span) for span in batch] for batch in batched(spans))

    def through_engine(self, op: tio.Op, spans: Spans) -> float:
        moves = [
            (self.file.fd, span.record.bases[0], span.address, span.record.nbytes) for span in spans
        ]
        return timed(self.engine.submit_many(self.queue, op, batch) for batch in batched(moves))

    def close(self) -> None:
        self._cleanup.close()


def batched(items: Sequence[T]) -> Iterator[list[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, BATCH)):
        yield batch


class Waitable(Protocol):
    def wait(self) -> None: ...


def timed(batches: Iterable[Sequence[Waitable]]) -> float:
    """Seconds until all have ended. A batch is started by being taken from ``batches``."""
    under_way: deque[Sequence[Waitable]] = deque()
    start = time.perf_counter()
    remaining = iter(batches)
    while (batch := next(remaining, None)) is not None:
        under_way.append(batch)
        if len(under_way) == WINDOW:  # its memory is the next batch's
            wait_all(under_way.popleft())
    while under_way:
        wait_all(under_way.popleft())
    return time.perf_counter() - start


def wait_all(batch: Sequence[Waitable]) -> None:
    for one in batch:
        one.wait()


def rate(mover: Mover, op: tio.Op, spans: Spans, seconds: float) -> float:
    """GB/s over as many passes as ``seconds`` take."""
    nbytes, elapsed = 0, 0.0
    while elapsed < seconds:
        elapsed += mover(op, spans)
        nbytes += sum(span.record.nbytes for span in spans)
    return nbytes / elapsed / 1e9


# ---- report ----------------------------------------------------------------------------------


def measure(rig: Rig, kib: tuple[int, int], arguments: argparse.Namespace) -> dict[str, object]:
    """All orders and directions of one size of record."""
    target = io_fio.Target(str(rig.path), rig.total, rig.file.direct)
    block = f"{kib[0]}k" if kib[0] == kib[1] else f"{kib[0]}k-{kib[1]}k"
    report: dict[str, object] = {"total_bytes": rig.total}
    with io_fio.reserved_huge_pages() if arguments.fio else contextlib.nullcontext(False) as huge:
        settings = [
            io_fio.Setting(*engine, block, depth, "mmaphuge" if huge else "malloc")
            for engine in io_fio.ENGINES
            for depth in FIO_DEPTHS
        ]
        for order, words in ORDERS.items():
            spans = rig.spans(order)
            rig.through_store(tio.Op.WRITE, spans)
            part: dict[str, object] = {}
            for op, word in zip(tio.Op, words, strict=True):
                sides: dict[str, Callable[[], float]] = {
                    name: partial(rate, mover, op, spans, arguments.seconds)
                    for name, mover in rig.movers.items()
                }
                if arguments.fio:
                    best = io_fio.best(target, word, settings, arguments.seconds / 2)
                    part[f"fio_{op.name.lower()}_setting"] = str(best)
                    sides["fio"] = partial(fio_rate, target, word, best, arguments.seconds)
                part |= compare(sides, op.name.lower(), arguments.pairs)
            report[order] = part
            if not arguments.json:
                print(block, order, json.dumps(part, indent=1))
    return report


def fio_rate(target: io_fio.Target, word: str, setting: io_fio.Setting, seconds: float) -> float:
    figures = io_fio.run(target, word, setting, seconds)
    if figures is None:
        raise SystemExit(f"fio failed with {setting}")
    return figures.gb_per_s


def compare(sides: dict[str, Callable[[], float]], op: str, pairs: int) -> dict[str, object]:
    """All sides in turn, forwards and backwards; medians, and ratios to fio."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in list(sides) if pair % 2 == 0 else list(sides)[::-1]:
            rates[name].append(sides[name]())
    report: dict[str, object] = {
        f"{name}_{op}_gb_per_s": round(statistics.median(values), 4) for name, values in rates.items()
    }
    for name in rates if "fio" in rates else ():
        if name != "fio":
            ratios = sorted(own / fio for own, fio in zip(rates[name], rates["fio"], strict=True))
            spread = (ratios[0], statistics.median(ratios), ratios[-1])
            report[f"{name}_{op}_ratio"] = round(spread[1], 4)
            report[f"{name}_{op}_ratio_spread"] = [round(one, 4) for one in spread]
    return report


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the drive to measure")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--records", type=argument.count, default=10_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each run, at least")
    parser.add_argument("--backend", default="auto", help=f"auto, {', '.join(tio.BACKENDS)}")
    parser.add_argument("--against", choices=("fio", "none"), default="fio")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    if arguments.records < BATCH or arguments.pairs < 1 or arguments.seconds <= 0:
        parser.error(f"--records is at least {BATCH}, --pairs at least 1, --seconds above 0")
    arguments.fio = arguments.against == "fio"
    if arguments.fio and shutil.which("fio") is None:
        print("fio is not installed: measuring ours only", file=sys.stderr)
        arguments.fio = False
    return arguments


def main() -> None:
    arguments = parse_arguments()
    unwind_on_sigterm()
    report: dict[str, object] = {}
    for size in arguments.sizes:
        with contextlib.closing(Rig(arguments, SIZES[size])) as rig:
            report[size] = measure(rig, SIZES[size], arguments)
            report |= {"backend": rig.engine.name, "direct": rig.file.direct}
    report |= {
        "records": arguments.records,
        "batch": BATCH,
        "depth": DEPTH,
        "pairs": arguments.pairs,
        "filesystem": find_mount(arguments.directory).filesystem,
        **facts(),
        "fio": io_fio.version() if arguments.fio else None,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
