"""Striping over two paths: is the sum of both reached, and do unequal paths finish together?

    python bench/paths.py --json

Records are read and written back through `TieredStore` as an optimizer does. ``sum_ratio``: both
paths striped, over the sum of each alone, in alternating runs. ``finish_gap``: of one large transfer,
how much earlier the part of one path is done, as a share of the whole time. Shares are measured as a
runtime does that has no profile (tiermem/tuning/quick.py), before every pair.

Two independent paths are rare, so they are made: loop devices over files in memory, each throttled by
the block layer (throttled.py; needs root). With --paths two directories of yours are measured instead,
which should lie on drives of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import throttled
from machine import facts, unwind_on_sigterm

from tiermem.io import Op, open_engine
from tiermem.memory.arena import Arena
from tiermem.memory.ledger import Ledger
from tiermem.store.mounts import find_mount
from tiermem.store.records import Record, RecordSpec
from tiermem.store.store import TieredStore
from tiermem.store.transfer import Transfer
from tiermem.tuning.profile import shares
from tiermem.tuning.quick import measure_quickly
from tiermem.types import Field, Purpose, Tier

SLICE_BYTES = 8 << 20
SLOTS = 8  # slices that are read or written at a time
RECORDS = 4  # moved at once in the large transfer
RECORD_BYTES = 128 << 20
RAMP_SECONDS = 0.3
Triple = list[float]


class StripedBench:
    """A store over ``paths`` with some records, written once, and a buffer of all their size."""

    def __init__(self, paths: Sequence[Path], weights: Sequence[float], num_records: int) -> None:
        with contextlib.ExitStack() as stack:
            nbytes = num_records * RECORD_BYTES
            self.engine = open_engine("auto", paths[0])
            stack.callback(self.engine.close)
            self.arena = Arena(nbytes, tier=Tier.HOST, ledger=Ledger({Tier.HOST: nbytes}), pin=True)
            stack.callback(self.arena.close, force=True)
            self.engine.register(self.arena.address, self.arena.nbytes)
            self.store = stack.enter_context(
                TieredStore(self.engine, self.arena, paths=paths, weights=weights)
            )
            block = self.arena.allocate(nbytes, Purpose.OPTIMIZER)
            assert block is not None
            self.address = block.address
            part = os.urandom(1 << 20)
            for at in range(0, nbytes, len(part)):
                block.view()[at : at + len(part)] = part
            self.records = [
                self.store.add(RecordSpec(f"record{i}", Field.EXP_AVG, RECORD_BYTES, Tier.NVME))
                for i in range(num_records)
            ]
            for record in self.records:
                self.store.write(record, 0, RECORD_BYTES, self.address).wait()
            stack.callback(self.store.drain)
            self._stack = stack.pop_all()

    def __enter__(self) -> StripedBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _slices(self) -> Iterator[tuple[Record, int]]:
        """Round and round, as step follows step."""
        while True:
            for record in self.records:
                for start in range(0, RECORD_BYTES, SLICE_BYTES):
                    yield record, start

    def gb_per_s(self, seconds: float) -> float:
        """Bytes read and written per second while every slice is read and then written back."""
        slices = self._slices()
        slots: deque[tuple[Transfer, int]] = deque()
        for slot in range(SLOTS):
            slots.append(self._start(Op.READ, next(slices), self.address + slot * SLICE_BYTES))
        began, moved = 0.0, 0
        start = time.perf_counter()
        while (now := time.perf_counter()) < start + RAMP_SECONDS + seconds:
            if not began and now >= start + RAMP_SECONDS:
                began, moved = time.perf_counter(), self._moved()
            transfer, address = slots.popleft()
            transfer.wait()
            if transfer.op is Op.READ:
                slots.append(self._start(Op.WRITE, (transfer.record, transfer.start), address))
            else:
                slots.append(self._start(Op.READ, next(slices), address))
        speed = (self._moved() - moved) / (time.perf_counter() - began) / 1e9
        self.store.drain()
        return speed

    def _start(self, op: Op, place: tuple[Record, int], address: int) -> tuple[Transfer, int]:
        record, at = place
        start = self.store.read if op is Op.READ else self.store.write
        return start(record, at, at + SLICE_BYTES, address), address

    def _moved(self) -> int:
        """By chunks, also of transfers that are under way."""
        stats = self.engine.stats()
        return stats.read_bytes + stats.written_bytes

    def finish_times(self, op: Op) -> list[float]:
        """Seconds until each path's part of all records, moved at once, is done."""
        start = self.store.read if op is Op.READ else self.store.write
        began = time.perf_counter()
        transfers = [
            start(record, 0, RECORD_BYTES, self.address + at * RECORD_BYTES)
            for at, record in enumerate(self.records)
        ]
        waiting = {
            path: [piece.request for t in transfers for piece in t.requests if piece.target == path]
            for path in range(self.store.num_paths)
        }
        ends = [0.0] * self.store.num_paths
        while waiting:
            for path, requests in list(waiting.items()):
                while requests and requests[-1].done():
                    requests.pop()
                if not requests:
                    ends[path] = time.perf_counter() - began
                    del waiting[path]
            time.sleep(0.0005)
        for transfer in transfers:
            transfer.wait()
        return ends


def quick_weights(paths: Sequence[Path]) -> tuple[float, ...]:
    """What a runtime without a profile would use."""
    return shares([each.balanced_gb_per_s for each in measure_quickly(paths)])


def compare(paths: Sequence[Path], arguments: argparse.Namespace) -> dict[str, object]:
    """Both, and each alone, in turn; then one large transfer in each direction."""
    ratios, gaps, speeds, weights = [], [], [], []
    for pair in range(arguments.pairs):
        weights.append(quick_weights(paths))
        setups = [(paths, weights[-1], RECORDS), *(([path], (1.0,), 1) for path in paths)]
        found: dict[int, float] = {}
        for number in range(len(setups)) if pair % 2 == 0 else reversed(range(len(setups))):
            with StripedBench(*setups[number]) as bench:
                found[number] = bench.gb_per_s(arguments.seconds)
                if number == 0:
                    gaps += [gap(bench.finish_times(op)) for op in (Op.WRITE, Op.READ)]
        ratios.append(found[0] / (found[1] + found[2]))
        speeds.append(found)
        if not arguments.json:
            print(
                f"pair {pair + 1}: alone {found[1]:.3f} and {found[2]:.3f}, striped {found[0]:.3f} "
                f"GB/s, shares {weights[-1][0]:.3f} and {weights[-1][1]:.3f}; finish gaps write "
                f"{gaps[-2]:.3f}, read {gaps[-1]:.3f}"
            )
    return {
        "striped_gb_per_s": triple([each[0] for each in speeds]),
        "alone_gb_per_s": [triple([each[number] for each in speeds]) for number in (1, 2)],
        "weights": [triple([each[number] for each in weights]) for number in (0, 1)],
        "sum_ratio": triple(ratios),
        "finish_gap": triple(gaps),
    }


def gap(ends: Sequence[float]) -> float:
    return (max(ends) - min(ends)) / max(ends)


def triple(values: Sequence[float]) -> Triple:
    """Lowest, median, highest."""
    return [round(v, 4) for v in (min(values), statistics.median(values), max(values))]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--paths", nargs=2, type=Path, help="two directories instead of loop devices")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.2, help="of each run")
    parser.add_argument(
        "--mb-per-s", type=int, default=300, help="throttle of the faster path, per direction"
    )
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    if arguments.pairs < 1 or arguments.seconds <= 0 or arguments.mb_per_s < 3:
        parser.error("--pairs is at least 1, --seconds above 0, --mb-per-s at least 3")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    if arguments.paths is not None:
        used = [f"{path} ({find_mount(path).filesystem})" for path in arguments.paths]
        return {"used": " and ".join(used), "given": compare(arguments.paths, arguments)}
    reason = throttled.why_not()
    if reason:
        return {"skipped": f"two independent paths cannot be made: {reason}; give --paths"}
    fast = arguments.mb_per_s * 10**6
    report: dict[str, object] = {
        "used": "two loop devices over files in memory, ext4, each with a blkio throttle per direction"
    }
    for name, slow in (("even", fast), ("uneven", fast // 3)):
        with throttled.ThrottledDrives([fast, slow], nbytes=3 << 29) as drives:
            if not arguments.json:
                print(f"{name}: {fast / 1e6:.0f} and {slow / 1e6:.0f} MB/s in each direction")
            report[name] = {"limits_mb_per_s": [fast / 1e6, slow / 1e6]} | compare(
                drives.paths, arguments
            )
    return report


def main() -> None:
    arguments = parse_arguments()
    unwind_on_sigterm()
    report = measure(arguments) | {
        "pairs": arguments.pairs,
        "seconds": arguments.seconds,
        **facts(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
