"""Loans of gather memory that end when the last view anywhere has died.

[Note: leases] A gathered buffer is lent as one uint8 tensor with a storage of its own (a ctypes
array over the arena, wrapped by ``torch.frombuffer``). Every view that anyone takes (autograd, a
recompute, a user's stash) keeps that storage alive, and the array's finalizer is the release
signal. So a buffer whose views outlive their group is merely slow to come back; it is never
recycled under somebody's feet. Finalizers may run inside any allocation (garbage collection), so
they only append to a deque; the pool takes the blocks back at its next loan. They are no Python code,
in which a Ctrl-C would be swallowed and the buffer lost.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.memory.arena import Arena, Block
from tiermem.memory.ledger import Ledger
from tiermem.types import Purpose, Tier, round_up


class Lease:
    """One loan: ``tensor`` is 1-D uint8, ``nbytes`` long (padded to 4096)."""

    __slots__ = ("__weakref__", "address", "label", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.tensor = tensor
        self.label = label
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()

    def typed(self, dtype: torch.dtype, start_byte: int, numel: int) -> torch.Tensor:
        """A 1-D view of ``numel`` elements of ``dtype`` from ``start_byte`` on."""
        return self.tensor[start_byte : start_byte + numel * dtype.itemsize].view(dtype)


class LeasePool(Protocol):
    """Device memory for unsharded parameters, under the device budget (bytes)."""

    host_addressable: bool

    def lend(self, nbytes: int, label: str) -> Lease | None:
        """A loan, or None while there is no room."""

    def reclaim(self) -> None:
        """Takes back what has died since the last call."""

    def holders(self) -> dict[str, int]:
        """Bytes out on loan by label."""

    def room(self) -> tuple[int, int]:
        """Bytes that are free, and how many of them in one piece."""

    def close(self) -> None: ...


def tensor_over(address: int, nbytes: int, keep: object = None) -> tuple[torch.Tensor, object]:
    """A uint8 tensor over foreign memory, and the exporter that lives as long as any view; it
    keeps ``keep`` alive."""
    exporter: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    exporter.keep = keep
    with torch.inference_mode(False):
        return torch.frombuffer(exporter, dtype=torch.uint8), exporter


class ArenaPool:
    """Leases over a CPU arena, ``limit_bytes`` of it at most. See [Note: leases]."""

    host_addressable = True

    def __init__(self, arena: Arena, limit_bytes: int, *, poison: bool = False) -> None:
        self._arena = arena
        self._left_bytes = limit_bytes
        self._poison = poison
        self._dead: deque[weakref.ref[Any]] = deque()
        self._out: dict[int, tuple[weakref.ref[Any], Block, str]] = {}  # by the reference's id

    def lend(self, nbytes: int, label: str) -> Lease | None:
        self.reclaim()
        padded = round_up(max(nbytes, 1))
        block = self._arena.allocate(padded, Purpose.GATHER) if padded <= self._left_bytes else None
        if block is None:
            return None
        self._left_bytes -= block.capacity
        tensor, exporter = tensor_over(block.address, block.capacity, block.mapping)
        death = weakref.ref(exporter, self._dead.append)
        self._out[id(death)] = (death, block, label)
        return Lease(tensor, label)

    def reclaim(self) -> None:
        while self._dead:
            _, block, _ = self._out.pop(id(self._dead.popleft()))
            if self._poison:
                ctypes.memset(block.address, 0xFF, block.nbytes)
            self._left_bytes += block.capacity
            self._arena.free(block)

    def holders(self) -> dict[str, int]:
        self.reclaim()
        result: dict[str, int] = {}
        for _, block, label in self._out.values():
            result[label] = result.get(label, 0) + block.capacity
        return result

    def room(self) -> tuple[int, int]:
        free = min(self._arena.free_bytes, self._left_bytes)
        return free, min(free, self._arena.largest_free)

    def close(self) -> None:
        self.reclaim()


class AcceleratorPool:
    """Leases in accelerator memory; the caching allocator protects views, we poll for deaths."""

    host_addressable = False

    def __init__(self, device: torch.device, ledger: Ledger, budget_bytes: int) -> None:
        self._device = device
        self._ledger = ledger
        self._budget = budget_bytes
        self._out: list[tuple[StorageWeakRef, int, str]] = []

    def lend(self, nbytes: int, label: str) -> Lease | None:
        self.reclaim()
        padded = round_up(max(nbytes, 1))
        if sum(size for _, size, _ in self._out) + padded > self._budget:
            return None
        with torch.inference_mode(False):
            tensor = torch.empty(padded, dtype=torch.uint8, device=self._device)
        self._ledger.reserve(Tier.DEVICE, Purpose.GATHER, padded)
        self._out.append((StorageWeakRef(tensor.untyped_storage()), padded, label))
        return Lease(tensor, label)

    def reclaim(self) -> None:
        alive = []
        for entry in self._out:
            if entry[0].expired():
                self._ledger.release(Tier.DEVICE, Purpose.GATHER, entry[1])
            else:
                alive.append(entry)
        self._out = alive

    def holders(self) -> dict[str, int]:
        self.reclaim()
        result: dict[str, int] = {}
        for _, size, label in self._out:
            result[label] = result.get(label, 0) + size
        return result

    def room(self) -> tuple[int, int]:
        free = self._budget - sum(size for _, size, _ in self._out)
        return free, free

    def close(self) -> None:
        self.reclaim()
