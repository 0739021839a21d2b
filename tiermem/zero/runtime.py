"""`Runtime`: owns the budgets, the store, the engine and everything that moves between tiers."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from tiermem.comm import Communicator, open_communicator, refuse_to_open, single
from tiermem.config import TierConfig, load_config
from tiermem.errors import ConfigError, StateError, TierIOError
from tiermem.kernels import open_kernels
from tiermem.memory.arena import Arena
from tiermem.memory.budget import check_host_budget, default_host_budget
from tiermem.memory.lease import AcceleratorPool, ArenaPool, LeasePool
from tiermem.memory.ledger import Ledger
from tiermem.memory.trim import return_blocks_from
from tiermem.schedule.placement import DevicePlan, plan_beside
from tiermem.store.records import Record
from tiermem.store.rundir import check_paths
from tiermem.store.store import TieredStore
from tiermem.tuning.choice import choose_paths, open_chosen_engine
from tiermem.types import ALIGNMENT, Field, Tier
from tiermem.zero.backward import BackwardTracker
from tiermem.zero.forward import ForwardTracker
from tiermem.zero.gather import GatherScheduler
from tiermem.zero.gradients import GradientStore
from tiermem.zero.group import ParamGroup
from tiermem.zero.interrupts import Deferral
from tiermem.zero.param import ShardedParam
from tiermem.zero.placeholder import Placeholder
from tiermem.zero.reduce import GradientReducer
from tiermem.zero.states import StateAccess
from tiermem.zero.stats import RuntimeStats, collect
from tiermem.zero.threads import use_threads
from tiermem.zero.update import UpdatePipeline
from tiermem.zero.updates import UpdateController

logger = logging.getLogger(__name__)

P = ParamSpec("P")


_RUNS = itertools.count(1)
"""Numbers the runtimes of this process. All ranks make the same ones."""


def _tell_waiting(error: BaseException, run: int) -> None:
    """Other ranks may wait for this one to shard a model with them."""
    if dist.is_available() and dist.is_initialized():
        refuse_to_open(error, run)


def _others_are_told(make: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """For a constructor: if it fails, this rank will not open a communicator with the others."""

    @functools.wraps(make)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._run = next(_RUNS)
        try:
            make(self, *args, **kwargs)
        except BaseException as error:
            _tell_waiting(error, self._run)
            raise

    return call


class Runtime:
    """The tiers of one process. Use it as a context manager, or call `close`.

    ``config`` is a `TierConfig`, a mapping with its keys, or the path of a JSON file. Raises
    `ConfigError` for a configuration that cannot work, `BudgetError` for a budget that would make
    the machine swap, `TierIOError` for a path that cannot be used.

    [Note: threads] The training thread (and autograd's) owns all state here; the update pipeline's
    worker and the engine's threads own what their modules say.
    """

    _run: int  # see `_RUNS`

    @_others_are_told
    def __init__(self, config: TierConfig | Mapping[str, Any] | str | Path) -> None:
        self.config = load_config(config)
        self._communicators: dict[ProcessGroup | None, Communicator] = {}
        self._torn: str | None = None
        self.interrupts = Deferral(self.mark_torn)
        self._closed = False
        self._failed = False  # an exception ended the block; others have been told
        self._pid = os.getpid()
        self.device = device_of(self.config)
        if self.device.type != "cpu" and self.config.optimizer == "device":
            raise ConfigError(
                "optimizer: 'device' is not supported on an accelerator: states are updated on the "
                "host. Remedy: optimizer: 'host' or 'nvme'"
            )
        threshold = self.config.malloc_mmap_threshold
        if threshold is not None and not return_blocks_from(int(threshold)):
            logger.warning("malloc_mmap_threshold has no effect: the C library is not glibc")
        budget = int(self.config.host_memory or default_host_budget())
        check_host_budget(budget)
        paths = self.config.paths if self.config.uses_nvme else ()
        check_paths(paths)
        given_io = self.config.io.given
        # Before the arena is there: measuring takes memory of its own for a moment.
        self.path_use = choose_paths(
            paths,
            weights=self.config.path_weights if paths else None,
            io=given_io,
            direct=self.config.io.direct,
        )
        self.ledger = Ledger({Tier.HOST: budget, Tier.DEVICE: 1 << 62})
        self.kernels = open_kernels(num_threads=use_threads(self.config.num_threads))
        self.host = Arena(
            budget,
            tier=Tier.HOST,
            ledger=self.ledger,
            pin=self.config.pin_memory,
            device=self.device.type,
        )
        self.engine = open_chosen_engine(self.path_use, given_io, paths[0] if paths else None)
        try:
            self._register(self.host)
            self.store = TieredStore(
                self.engine,
                self.host,
                paths=paths,
                weights=self.path_use.weights,
                stripe_bytes=int(self.config.stripe_bytes),
                queue_options=self.path_use.queue_options,
                direct=self.config.io.direct,
                on_failed_write=self._write_failed,
            )
        except BaseException:
            self.engine.close()
            self.host.close(force=True)
            self.kernels.close()
            raise
        self.device_arena: Arena | None = None
        self.device_store: TieredStore | None = None
        self.device_plan: DevicePlan | None = None
        self.pipeline = UpdatePipeline(self.store, self.host, self.kernels)
        self.gradients = GradientStore(self.store, self.host, self.kernels)
        self.gradients.adds_in_fp32 = self.config.gradient_accumulation_dtype == "fp32"
        self.states = StateAccess(self.pipeline)
        self.gather = GatherScheduler(self, self.store, self.pipeline, self.host)
        self.forward = ForwardTracker(self)
        self.backward = BackwardTracker(self)
        self.updates = UpdateController(self, in_backward=self.config.effective_update == "backward")
        self.reducer = GradientReducer(self, self.gradients, self.host, self.kernels)
        self.pipeline.gradients = self.gradients
        self.gradients.wait_for_release = self.gather.wait_for_release
        self._num_regions = 0
        self.started = time.perf_counter()

    # ---- set-up (used by shard)

    def open_device(self, plan: DevicePlan) -> None:
        """Makes device memory of ``plan.budget`` bytes; called by the first `shard`."""
        if self.device_plan is not None:
            raise StateError("device memory is open already")
        plan = replace(plan, budget=max(plan.budget, ALIGNMENT))
        self.device_plan = plan
        pool: LeasePool
        if self.device.type == "cpu":
            wanted = "device_memory (by default what the model and prefetch_bytes need) and host_memory"
            check_host_budget(plan.budget + self.host.free_bytes, what=wanted)
            self.device_arena = Arena(
                plan.budget,
                tier=Tier.DEVICE,
                ledger=self.ledger,
                pin=self.config.pin_memory,
                device="cpu",
            )
            self._register(self.device_arena)
            self.device_store = TieredStore(self.engine, self.device_arena)
            limit = plan.budget - plan.states_bytes
            pool = ArenaPool(self.device_arena, limit, poison=self.config.poison_released)
        else:
            pool = AcceleratorPool(self.device, self.ledger, plan.budget)
        self.gather.room.pool = pool

    def extend_device(self, plan: DevicePlan) -> None:
        """Another model with this plan comes into the device memory that is open."""
        assert self.device_plan is not None
        self.device_plan = plan_beside(self.device_plan, plan)

    def communicator(self, group: ProcessGroup | None) -> Communicator:
        """The communicator of this runtime among the ranks of ``group`` (None: of the default group,
        or this process alone). All of its ranks make it together, the first time."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return single()
        if group not in self._communicators:
            self._communicators[group] = open_communicator(group, self._run)
        return self._communicators[group]

    @property
    def communicators(self) -> list[Communicator]:
        """Those made so far; none for a process alone."""
        return list(self._communicators.values())

    def next_region_number(self) -> int:
        """Numbers regions in the order in which they are made, alike on all ranks."""
        self._num_regions += 1
        return self._num_regions - 1

    def _register(self, arena: Arena) -> None:
        """Nothing unregisters: `close` closes the engine before the arenas. Registering pins what
        transfers touch, which is what ``pin_memory`` allows."""
        if self.config.pin_memory:
            self.engine.register(arena.address, arena.nbytes)

    @property
    def transfer_groups(self) -> int:
        """How many groups at a time may be in host memory on their way to an accelerator."""
        return 0 if self.device.type == "cpu" else 3

    @property
    def device_plan_budget(self) -> int:
        return self.device_plan.budget if self.device_plan is not None else 0

    @property
    def groups(self) -> list[ParamGroup]:
        return self.gather.groups

    # ---- health

    def check_usable(self) -> None:
        """Raises `StateError` if the run is closed, torn, or in a forked child."""
        if self._closed:
            raise StateError("the runtime is closed; open a new one and load a checkpoint")
        if os.getpid() != self._pid:
            raise StateError(
                "this process was forked from the one that owns the runtime. Remedy: use 'spawn', or "
                "keep sharded models out of worker processes"
            )
        for communicator in self._communicators.values():
            communicator.check()
        if self._torn is not None:
            self.store.raise_failed()  # once, with where it happened; StateError from then on
            raise StateError(self._torn)

    def mark_torn(self, error: BaseException) -> None:
        """See [Note: torn] in update.py. Any thread."""
        if self._torn is None:
            self._torn = (
                f"the run is TORN: something failed after some of an update had been written "
                f"({error}), so some parameters are new and some old. Remedy: start a new run from a "
                f"checkpoint"
            )
            logger.error("%s", self._torn)

    def _write_failed(self, record: Record, error: TierIOError) -> None:
        """For the store, on any thread. A gradient that could not be written is still in memory; of
        anything else there is no second copy."""
        if record.spec.field != Field.GRAD:
            self.mark_torn(error)

    @property
    def torn(self) -> bool:
        return self._torn is not None

    # ---- for users

    def drain(self) -> None:
        """Applies every pending update and waits for all I/O; afterwards the store is current."""
        with self.interrupts:
            self._drain()

    def _drain(self) -> None:
        self.backward.forget_stale()
        self.check_usable()
        self.gather.apply_pending()
        for group in self.groups:
            self.gather.ready(group)
            self.gather.settle(group)
        self.gather.finish_writes()
        self.pipeline.settle()
        self.store.drain()
        self.check_usable()

    def stats(self) -> RuntimeStats:
        """Bytes, seconds and memory since the runtime was made."""
        return collect(self)

    def close(self) -> None:
        """Applies what is pending, drains, deletes this run's files. Idempotent.

        Raises the first error after everything is cleaned up; in a forked child it does nothing.
        """
        with self.interrupts:
            if not self._closed and os.getpid() == self._pid:
                self._close()

    def abandon(self) -> None:
        """Closes it without what is pending; at the end of a process that did not `close` it. What goes
        wrong is logged."""
        self._failed = True
        try:
            self.close()
        except Exception as error:
            logger.error("giving the runtime up failed: %s", error)

    def _close(self) -> None:
        errors: list[Exception] = []
        if not self.torn and not self._failed:
            self._attempt(self.drain, errors)
        if not errors and not self.torn and not self._failed:
            self._attempt(self.gather.shares.honour_all, errors)
        for error in errors:
            self._tell_others(error)
        self._closed = True
        self._attempt(self.forward.close, errors)
        for communicator in self._communicators.values():
            communicator.close(failed=bool(errors) or self.torn or self._failed)
        self.gather.close(errors.append)
        self._attempt(self.pipeline.close, errors)
        self._attempt(self.reducer.close, errors)
        self._attempt(self.gradients.close, errors)
        if self.device_store is not None:
            self._attempt(self.device_store.close, errors)
        self._attempt(self.store.close, errors)
        self._attempt(self.engine.close, errors)
        if self.gather.room.pool is not None:
            self.gather.room.pool.close()
        self._close_arenas()
        self.kernels.close()
        if errors:
            raise errors[0]

    def _close_arenas(self) -> None:
        # Views that users still hold keep the mapping alive; see [Note: leases].
        for arena in (self.device_arena, self.host):
            if arena is not None:
                arena.close(force=True)

    @staticmethod
    def _attempt(action: Any, errors: list[Exception]) -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not self._closed:
            self._failed = bool(self._communicators)  # what is pending then needs the others
            self._tell_others(error)
        try:
            self.close()
        except Exception as close_error:
            if error is None:
                raise
            logger.error("closing the runtime failed too: %s", close_error)

    def _tell_others(self, error: BaseException) -> None:
        for communicator in self._communicators.values():
            communicator.fail(error)
        _tell_waiting(error, self._run)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            warnings.warn(
                "a tiermem.Runtime was not closed; use it as a context manager",
                ResourceWarning,
                stacklevel=2,
            )

    def resolve(self, param: torch.Tensor) -> ShardedParam:
        """The sharded parameter behind a placeholder, or behind the real one that stands in its
        slot inside a forward. Raises `StateError` for any other tensor."""
        if isinstance(param, Placeholder):
            handle = param._handle
            if isinstance(handle, ShardedParam) and handle.group.runtime is self:
                return handle
        for group in self.groups:
            for candidate in group.params:
                if candidate.real is param:
                    return candidate
        raise StateError(
            f"a tensor of shape {tuple(param.shape)} is not a parameter of this runtime. Remedy: "
            f"pass what model.parameters() gives after tiermem.shard(model, runtime); a module that "
            f"was put into the model later is sharded by itself first, tiermem.shard(module, runtime)"
        )


def device_of(config: TierConfig) -> torch.device:
    """Where a runtime with ``config`` computes. Raises `ConfigError` for a device that is not there."""
    if config.device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else torch.device(found.type)
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"device: {config.device!r} is not a device: {error}") from error
    if device.type != "cpu":
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != device.type:
            raise ConfigError(f"device: {config.device!r} is not available here; use 'cpu' or 'auto'")
    return device
