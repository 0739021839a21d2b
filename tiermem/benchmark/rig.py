"""What the runs of one setting share, and what its engine has counted."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

from tiermem.benchmark.figures import Flow, Run
from tiermem.benchmark.plan import Mode, Pages, Setting
from tiermem.io import AlignedBuffer, Engine, Op
from tiermem.io.latency import Latency


@dataclass(frozen=True, slots=True)
class Counters:
    """Of all queues of each place at one moment."""

    seconds: float
    cpu_seconds: float
    nbytes: list[dict[Op, int]]
    latency: list[dict[Op, Latency]]


@dataclass(frozen=True, slots=True)
class Rig:
    """An engine with ``queues[place][thread]``, and buffers by pages."""

    setting: Setting
    engine: Engine
    queues: list[list[int]]
    buffers: dict[Pages, AlignedBuffer]

    def count(self) -> Counters:
        """What has been moved since the engine was opened."""
        moved = self.engine.stats().by_queue
        usage = resource.getrusage(resource.RUSAGE_SELF)
        nbytes = [
            {op: sum(moved[queue][op] for queue in queues) for op in Op} for queues in self.queues
        ]
        latency = [
            {op: sum((self.engine.latency(q, op) for q in queues), Latency()) for op in Op}
            for queues in self.queues
        ]
        return Counters(time.monotonic(), usage.ru_utime + usage.ru_stime, nbytes, latency)


def difference(before: Counters, after: Counters, mode: Mode) -> Run:
    """The run between two moments."""
    seconds = after.seconds - before.seconds
    paths = []
    for number in range(len(after.nbytes)):
        flows = {}
        for op in mode.ops:
            latency = after.latency[number][op] - before.latency[number][op]
            nbytes = after.nbytes[number][op] - before.nbytes[number][op]
            flows[op] = Flow(nbytes, latency.count, seconds, latency)
        paths.append(flows)
    return Run(tuple(paths), after.cpu_seconds - before.cpu_seconds)
