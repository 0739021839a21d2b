"""Every name of torch.distributed used here that is private or undocumented, each behind one
function. A test exercises each of them, so that a torch release that changes one is found by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist


class Store(Protocol):
    """What is used of a c10d store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


class Work(Protocol):
    """One transfer under way."""

    def wait(self, timeout: timedelta) -> bool: ...
    def is_completed(self) -> bool: ...  # of gloo: whether a wait has returned


class Transport(Protocol):
    """Tagged transfers between the ranks of a group."""

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> Work: ...
    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> Work: ...


def group_store(group: dist.ProcessGroup) -> Store:
    """The group's own part of the store it was made with."""
    store: Store = group.get_group_store()
    return store


def store_below(store: Store, prefix: str) -> Store:
    """The part of ``store`` below ``prefix``, over a connection of its own where it is TCP: calls on
    one connection wait for each other, even those of another part."""
    below: Store = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
    return below


def open_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Transport:
    """A gloo group that torch's registry does not know: it closes its connections when nobody holds
    it or one of its works any more. Connects all ranks, so it waits for them, up to ``timeout``."""
    make: Any = dist.distributed_c10d.ProcessGroupGloo
    transport: Transport = make(store, rank, size, timeout)
    return transport
