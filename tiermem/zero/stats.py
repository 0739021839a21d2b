"""What a runtime has done: bytes, seconds, memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiermem.memory.ledger import TierUsage
from tiermem.store.stats import StoreStats
from tiermem.tuning.candidates import Candidate
from tiermem.tuning.profile import PathBandwidth
from tiermem.types import Field, Tier

if TYPE_CHECKING:
    from tiermem.zero.runtime import Runtime


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of one budget, by purpose."""

    used: int
    peak: int
    budget: int
    locked: int
    by_purpose: dict[str, int]


@dataclass(frozen=True, slots=True)
class PathShare:
    """One path: its share of what lies on all paths, what was measured of it (None: nothing), and the
    bytes that were moved."""

    path: str
    weight: float
    bandwidth: PathBandwidth | None
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Totals since the runtime was made. Bytes read and written are those of storage paths;
    ``copied_bytes`` moved between host memory and buffers."""

    seconds: float
    read_bytes: int
    written_bytes: int
    copied_bytes: int
    stall_seconds: float  # of the training thread, waiting for gathers, updates or room
    exchange_wait_seconds: float  # of those and others: waiting for other ranks
    update_seconds: float  # of the worker, in kernels
    prefetch_hits: int
    prefetch_misses: int
    host: MemoryStats
    device: MemoryStats
    placement: dict[str, dict[str, int]]  # field: tier: bytes
    backend: str
    backend_reason: str
    kernels: str
    direct: bool  # every path is O_DIRECT
    update_mode: str
    num_parameters: int
    paths: tuple[PathShare, ...]
    path_weights_from: str
    grad_norm: float | None  # the last that was computed, before clipping and without the loss scale
    clipped_grad_norm: float | None
    loss_scale: float | None
    skipped_steps: int  # for overflows
    io: Candidate  # with the backend in use
    io_from: str


def collect(runtime: Runtime) -> RuntimeStats:
    store = runtime.store.stats()
    snapshot = runtime.ledger.snapshot()
    budget = runtime.device_plan_budget
    return RuntimeStats(
        seconds=time.perf_counter() - runtime.started,
        read_bytes=sum(path.read_bytes for path in store.paths),
        written_bytes=sum(path.written_bytes for path in store.paths),
        copied_bytes=store.copied_bytes,
        stall_seconds=runtime.gather.stall_seconds
        + runtime.gather.shares.stall_seconds
        + runtime.gradients.stall_seconds,
        exchange_wait_seconds=sum(comm.waited_seconds for comm in runtime.communicators),
        update_seconds=runtime.pipeline.busy_seconds,
        prefetch_hits=runtime.gather.prefetch_hits,
        prefetch_misses=runtime.gather.prefetch_misses,
        host=_memory(snapshot.tiers[Tier.HOST], None, runtime.host.locked_bytes),
        device=_memory(
            snapshot.tiers[Tier.DEVICE],
            budget,
            runtime.device_arena.locked_bytes if runtime.device_arena is not None else 0,
        ),
        placement=placement(runtime),
        backend=runtime.engine.name,
        backend_reason=runtime.engine.reason,
        kernels=runtime.kernels.name,
        direct=runtime.store.direct,
        update_mode="backward" if runtime.updates.in_backward else "deferred",
        num_parameters=sum(p.inner.numel() for g in runtime.groups for p in g.params),
        paths=_paths(runtime, store),
        path_weights_from=runtime.path_use.weights_from,
        grad_norm=runtime.updates.figures.grad_norm,
        clipped_grad_norm=runtime.updates.figures.clipped_norm,
        loss_scale=runtime.updates.figures.loss_scale,
        skipped_steps=runtime.updates.figures.skipped_steps,
        io=replace(runtime.path_use.settings, backend=runtime.engine.name),
        io_from=runtime.path_use.settings_from,
    )


def _paths(runtime: Runtime, store: StoreStats) -> tuple[PathShare, ...]:
    use = runtime.path_use
    bandwidths = use.bandwidths or (None,) * len(store.paths)
    total = sum(use.weights)
    return tuple(
        PathShare(str(path), weight / total, bandwidth, moved.read_bytes, moved.written_bytes)
        for path, weight, bandwidth, moved in zip(
            runtime.config.paths, use.weights, bandwidths, store.paths, strict=False
        )
    )


def _memory(usage: TierUsage, budget: int | None, locked: int) -> MemoryStats:
    return MemoryStats(
        used=usage.used_bytes,
        peak=usage.peak_bytes,
        budget=usage.budget_bytes if budget is None else budget,
        locked=locked,
        by_purpose={purpose.value: u.used_bytes for purpose, u in usage.by_purpose.items()},
    )


def placement(runtime: Runtime) -> dict[str, dict[str, int]]:
    """Bytes of each kind of record in each tier."""
    result: dict[str, dict[str, int]] = {}

    def add(field: str, tier: Tier, nbytes: int) -> None:
        if nbytes:
            of_field = result.setdefault(str(field), {t.value: 0 for t in Tier})
            of_field[tier.value] += nbytes

    for group in runtime.groups:
        if group.record is None:
            add(Field.PARAM, Tier.DEVICE, group.nbytes)
        else:
            add(Field.PARAM, Tier.HOST, group.record.host_bytes)
            add(Field.PARAM, Tier.NVME, max(0, group.record.nbytes - group.record.host_bytes))
        for region in group.regions:
            for name, state in region.states.items():
                device = state.store is runtime.device_store
                add(name, Tier.DEVICE if device else Tier.HOST, state.record.host_bytes)
                if not state.record.host_only:
                    add(name, Tier.NVME, max(0, state.record.nbytes - state.record.host_bytes))
    return result
