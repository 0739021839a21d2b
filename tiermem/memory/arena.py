"""`Arena`: all the memory of one budget, as one mapping that blocks are cut from."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import threading
import warnings
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from tiermem.errors import BudgetError, StateError
from tiermem.memory.ledger import Ledger
from tiermem.memory.mapping import Mapping
from tiermem.memory.ranges import RangeSet
from tiermem.memory.register import register_host_memory, wants_registration
from tiermem.types import ALIGNMENT, Purpose, Tier, format_bytes, round_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """``nbytes`` at ``address`` (a multiple of 4096), lent by an arena. Compared by identity.

    The memory behind it stays mapped as long as this object or a view of it lives, even if the
    arena is closed by force; after `Arena.free` its contents may change at any time.
    """

    address: int
    nbytes: int
    purpose: Purpose
    mapping: Mapping = field(repr=False)

    @property
    def capacity(self) -> int:
        """``nbytes`` rounded up to 4096: what transfers may use and what the budget is charged."""
        return round_up(self.nbytes)

    def view(self) -> memoryview:
        """The block as writable bytes, ``nbytes`` long."""
        array: Any = (ctypes.c_char * self.nbytes).from_address(self.address)
        array.mapping = self.mapping  # the memory must outlive the view
        return memoryview(array).cast("B")


class Arena:
    """A budget of ``nbytes`` (rounded down to 4096) of ``tier``, mapped at once, touched lazily.

    Blocks are cut best fit at 4096 bytes and merged again when freed. There is no further rounding:
    2 MiB-aligned starts were considered for large blocks, but the arena lies on huge pages as a
    whole, so that any 4096-aligned megabyte is at most two physical segments, and the gaps in front
    of aligned blocks would cost budget.

    ``pin`` locks the memory as far as the limit allows (never an error) and registers it with
    ``device`` where that is a CUDA device (None: the accelerator of torch, if torch is loaded).
    All methods may be called from any thread, but not from finalizers: those run inside any allocation,
    also inside one that this arena makes under its lock.
    """

    def __init__(
        self, nbytes: int, *, tier: Tier, ledger: Ledger, pin: bool, device: str | None = None
    ) -> None:
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        if self.nbytes <= 0:
            raise BudgetError(
                f"an arena of {nbytes} bytes of {tier.value} memory is empty; give at least {ALIGNMENT}"
            )
        self.tier = tier
        self._ledger = ledger
        self._mapping: Mapping | None = Mapping(self.nbytes)
        self._base = self._mapping.address
        self.huge_pages = self._mapping.huge_pages
        """``advised``, or why there are none. What was obtained: `huge_page_bytes`."""
        self._lock = threading.Lock()
        # Free extents by start; sizes in the same order. Guarded by _lock, as all that follows.
        self._starts = [0]
        self._sizes = [self.nbytes]
        self._blocks: dict[int, Block] = {}
        self._locked = RangeSet()
        self._lock_blocks = False
        self._said_unlocked = False
        self.registered = False
        """Whether an accelerator's driver has the arena page-locked."""
        if pin:
            self._pin(device)

    def allocate(self, nbytes: int, purpose: Purpose) -> Block | None:
        """A block of ``nbytes``, or None while there is no contiguous room (or no budget) for it.

        Raises `StateError` after `close`. The contents are undefined.
        """
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        capacity = round_up(nbytes)
        with self._lock:
            if self._mapping is None:
                raise StateError(f"the {self.tier.value} arena is closed; allocate before close()")
            at = self._best_fit(capacity)
            if at is None:
                return None
            try:
                self._ledger.reserve(self.tier, purpose, capacity)
            except BudgetError:
                return None
            start = self._starts[at]
            self._take(at, capacity)
            block = Block(self._base + start, nbytes, purpose, self._mapping)
            self._blocks[block.address] = block
            if self._lock_blocks:
                self._lock_range(self._mapping, start, start + capacity)
            return block

    def free(self, block: Block) -> None:
        """Takes ``block`` back. Raises `StateError` if it is not out (freed twice, or foreign)."""
        with self._lock:
            if self._blocks.get(block.address) is not block:
                raise StateError(
                    f"{block} is not lent by this {self.tier.value} arena; free each block once"
                )
            del self._blocks[block.address]
            self._give(block.address - self._base, block.capacity)
            self._ledger.release(self.tier, block.purpose, block.capacity)

    @property
    def address(self) -> int:
        """Where the memory begins; it is ``nbytes`` long."""
        return self._base

    @property
    def largest_free(self) -> int:
        """Bytes of the largest block that could be had now."""
        with self._lock:
            return max(self._sizes, default=0)

    @property
    def free_bytes(self) -> int:
        """Bytes that are not lent, contiguous or not."""
        with self._lock:
            return sum(self._sizes)

    @property
    def locked_bytes(self) -> int:
        """Bytes that cannot be swapped out (once touched, where the whole arena is locked)."""
        with self._lock:
            return self._locked.total

    def huge_page_bytes(self) -> int:
        """Bytes that lie on huge pages now. Reads /proc; not for hot paths."""
        with self._lock:
            mapping = self._mapping
        return mapping.huge_page_bytes() if mapping else 0

    def contains(self, address: int) -> bool:
        """Whether ``address`` lies in this arena."""
        return self._base <= address < self._base + self.nbytes

    def held(self) -> dict[Purpose, int]:
        """Bytes lent now, by purpose."""
        with self._lock:
            return self._held()

    def close(self, *, force: bool = False) -> None:
        """Gives the memory back. Idempotent.

        Raises `StateError` naming who holds blocks, unless ``force``: then the memory goes when the
        last block and view have died, and those blocks may still be freed.
        """
        with self._lock:
            if self._mapping is None:
                return
            if self._blocks and not force:
                holders = ", ".join(
                    f"{purpose.value}: {nbytes} bytes ({format_bytes(nbytes)})"
                    for purpose, nbytes in self._held().items()
                )
                raise StateError(
                    f"{len(self._blocks)} blocks of the {self.tier.value} arena are still out "
                    f"({holders}); free them first or close with force=True"
                )
            self._ledger.add_locked(-self._locked.total)
            self._locked.clear()
            self._mapping = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn(f"{self.tier.value} arena was not closed", ResourceWarning, stacklevel=2)

    def _held(self) -> dict[Purpose, int]:
        held: dict[Purpose, int] = {}
        for block in self._blocks.values():
            held[block.purpose] = held.get(block.purpose, 0) + block.capacity
        return held

    def _best_fit(self, capacity: int) -> int | None:
        best: int | None = None
        for at, size in enumerate(self._sizes):
            if size >= capacity and (best is None or size < self._sizes[best]):
                best = at
        return best

    def _take(self, at: int, capacity: int) -> None:
        if self._sizes[at] == capacity:
            del self._starts[at], self._sizes[at]
        else:
            self._starts[at] += capacity
            self._sizes[at] -= capacity

    def _give(self, start: int, size: int) -> None:
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and start + size == self._starts[at]:
            size += self._sizes[at]
            del self._starts[at], self._sizes[at]
        if at > 0 and self._starts[at - 1] + self._sizes[at - 1] == start:
            self._sizes[at - 1] += size
        else:
            self._starts.insert(at, start)
            self._sizes.insert(at, size)

    def _pin(self, device: str | None) -> None:
        mapping = self._mapping
        assert mapping is not None
        if wants_registration(device):
            unregister = register_host_memory(self._base, self.nbytes)
            if unregister is not None:
                mapping.before_unmap(unregister)
                self.registered = True
                self._count_locked(0, self.nbytes)
                return
        # The whole range at once keeps it one VMA (a lock's edge inside a huge page would split
        # it) and populates nothing. Where the limit is too small, blocks are locked one by one.
        error = mapping.lock_on_touch()
        if not error:
            self._count_locked(0, self.nbytes)
            return
        self._lock_blocks = True

    def _lock_range(self, mapping: Mapping, start: int, stop: int) -> None:
        """Freed blocks stay locked, so only what never was is locked (and so populated) here."""
        for low, high in self._locked.missing(start, stop):
            error = mapping.lock(self._base + low, high - low)
            if error:
                self._say_unlocked(high - low, error)
            else:
                self._count_locked(low, high)

    def _count_locked(self, start: int, stop: int) -> None:
        self._locked.add(start, stop)
        self._ledger.add_locked(stop - start)

    def _say_unlocked(self, nbytes: int, error: int) -> None:
        if self._said_unlocked:
            return
        self._said_unlocked = True
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        logger.warning(
            "%d bytes of %s memory could not be locked (%s; the limit is %s, %d bytes are locked): "
            "they may be swapped out. Raise it with `ulimit -l`, or set pin_memory: false.",
            nbytes,
            self.tier.value,
            os.strerror(error),
            shown,
            self._locked.total,
        )
