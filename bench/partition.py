"""Bandwidth-centric partitioning: every rank reads its own shard from its own drive.

    python bench/partition.py --json        (as root)

Stage 3 with parameters and states on NVMe, on 1, 2 and 4 ranks, each with a drive of its own: loop
devices over files in memory, throttled by the block layer (throttled.py). Passes without gradients
gather every group in order. ``gb_per_s``: bytes of parameters that come from drives, of which every
rank gets all, per second; ``scaling_2`` and ``scaling_4``: over one rank's, medians of the rounds.
``read_over_whole_N``: what one rank has read of all that it gathered (alone it keeps some from pass to
pass; what it keeps is not counted as fetched).

With R ranks a group is there after the time that one drive takes for 1 / R of it, as long as the
network and the processors keep up; so the drives are slow here (``--mb-per-s``), as a machine's drives
are slow beside its processors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arguments as argument
import throttled
from launch import launch
from machine import facts, unwind_on_sigterm

from tiermem.models.gpt import GPTConfig

HERE = Path(__file__).resolve().parent
RANKS = (1, 2, 4)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--params", type=argument.count, default=argument.count("24M"))
    parser.add_argument("--mb-per-s", type=int, default=30, help="of each drive, per direction")
    parser.add_argument("--passes", type=int, default=3, help="over the model, timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    if min(arguments.mb_per_s, arguments.passes, arguments.rounds) < 1:
        parser.error("--mb-per-s, --passes and --rounds are at least 1")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    reason = throttled.why_not()
    if reason:
        return {"skipped": f"a drive for each rank cannot be made: {reason}"}
    model = GPTConfig.for_parameters(arguments.params, context=64)
    limit = arguments.mb_per_s * 10**6
    speeds: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    facts: dict[str, Any] = {}
    with throttled.ThrottledDrives([limit] * max(RANKS), nbytes=1 << 30) as drives:
        for number in range(arguments.rounds):
            for ranks in RANKS if number % 2 == 0 else RANKS[::-1]:
                spec = {
                    "model": asdict(model),
                    "passes": arguments.passes,
                    "paths": [str(path) for path in drives.paths],
                    "config": {
                        "params": "nvme",
                        "optimizer": "nvme",
                        "resident_memory": 0,
                        "host_memory": "128MiB",
                        "compute_dtype": "bf16",
                        "device": "cpu",
                        "max_reuse_numel": 0,
                    },
                }
                done = launch(HERE / "partition_worker.py", spec, ranks, threads=1)
                whole = done[0]["whole_bytes"] * arguments.passes
                seconds = max(rank["seconds"] for rank in done)
                fetched = sum(rank["read_bytes"] for rank in done)
                speeds[ranks].append(fetched / seconds / 1e9)
                facts[f"read_over_whole_{ranks}"] = max(rank["read_bytes"] for rank in done) / whole
                facts["direct"] = all(rank["direct"] for rank in done)
                facts["backend"] = done[0]["backend"]
                if not arguments.json:
                    print(f"{ranks} ranks: {speeds[ranks][-1]:.4f} GB/s", flush=True)
    report: dict[str, Any] = {"parameters": model.num_parameters, **facts}
    for ranks in RANKS:
        values = speeds[ranks]
        report[f"gb_per_s_{ranks}"] = [min(values), statistics.median(values), max(values)]
    for ranks in RANKS[1:]:
        ratios = [many / one for many, one in zip(speeds[ranks], speeds[1], strict=True)]
        report[f"scaling_{ranks}"] = statistics.median(ratios)
        report[f"scaling_{ranks}_spread"] = [min(ratios), max(ratios)]
    return report


def main() -> None:
    arguments = parse_arguments()
    unwind_on_sigterm()
    report = measure(arguments) | {
        "mb_per_s": arguments.mb_per_s,
        **facts(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
