"""Results: one run's figures, and their statistics over the runs of a setting."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiermem.benchmark.plan import Mode, Pages, Setting
from tiermem.io import Op
from tiermem.io.latency import Latency

PERCENTILES = {"p50_us": 50.0, "p99_us": 99.0, "p999_us": 99.9}


@dataclass(frozen=True, slots=True)
class Flow:
    """What one operation moved in ``seconds``, in one path or in all."""

    nbytes: int
    blocks: int
    seconds: float
    latency: Latency

    @property
    def gb_per_s(self) -> float:
        """In units of 10**9 bytes per second."""
        return self.nbytes / self.seconds / 1e9

    @property
    def iops(self) -> float:
        """Blocks per second."""
        return self.blocks / self.seconds

    def __add__(self, other: Flow) -> Flow:
        """Two paths in the same run."""
        return Flow(
            self.nbytes + other.nbytes,
            self.blocks + other.blocks,
            max(self.seconds, other.seconds),
            self.latency + other.latency,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One run: by path, by operation."""

    paths: tuple[Mapping[Op, Flow], ...]
    cpu_seconds: float

    def total(self, op: Op) -> Flow:
        """All paths together."""
        flows = [flows[op] for flows in self.paths]
        return sum(flows[1:], flows[0])


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the runs."""

    mean: float
    median: float
    lowest: float
    highest: float
    stdev: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        numbers = list(values)
        return cls(
            mean=statistics.fmean(numbers),
            median=statistics.median(numbers),
            lowest=min(numbers),
            highest=max(numbers),
            stdev=statistics.stdev(numbers) if len(numbers) > 1 else 0.0,
        )

    def fields(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 6) for name in Spread.__slots__}


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of one mode at one setting."""

    mode: Mode
    setting: Setting
    pages: Pages
    runs: tuple[Run, ...]

    @property
    def gb_per_s(self) -> Spread:
        """Of reads and writes together, all paths."""
        return Spread.of(sum(run.total(op).gb_per_s for op in self.mode.ops) for run in self.runs)

    def fields(self, paths: Sequence[str]) -> dict[str, Any]:
        """As plain values; units are in the names. The aggregate, then each path."""
        fields: dict[str, Any] = {
            "mode": self.mode.value,
            "block_bytes": self.setting.block_bytes,
            "depth": self.setting.depth,
            "threads": self.setting.threads,
            "pages": self.pages.value,
            "runs": len(self.runs),
        }
        for op in self.mode.ops:
            fields[op.name.lower()] = flow_fields([run.total(op) for run in self.runs])
        fields["cpu_seconds_per_gib"] = round(
            statistics.median(self._cpu_seconds_per_gib(run) for run in self.runs), 6
        )
        fields["paths"] = [
            {"path": path}
            | {
                op.name.lower(): flow_fields([r.paths[number][op] for r in self.runs])
                for op in self.mode.ops
            }
            for number, path in enumerate(paths)
        ]
        return fields

    def _cpu_seconds_per_gib(self, run: Run) -> float:
        moved = sum(run.total(op).nbytes for op in self.mode.ops)
        return run.cpu_seconds / max(1, moved) * (1 << 30)


def latency_of(flows: Sequence[Flow]) -> Latency:
    """Of all runs together: percentiles are taken over every block of every run."""
    return sum((flow.latency for flow in flows), Latency())


def flow_fields(flows: Sequence[Flow]) -> dict[str, Any]:
    """Statistics of one operation over the runs."""
    latency = latency_of(flows)
    times = {name: latency.percentile_ns(percent) for name, percent in PERCENTILES.items()}
    times["mean_us"] = latency.mean_ns
    return {
        "gb_per_s": Spread.of(flow.gb_per_s for flow in flows).fields(),
        "iops": Spread.of(flow.iops for flow in flows).fields(),
        "latency": {
            "blocks": latency.count,
            **{name: None if ns is None else round(ns / 1000, 3) for name, ns in times.items()},
        },
    }
