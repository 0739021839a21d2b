"""Asynchronous transfers between storage and memory. Imports no torch.

`open_file` reads and writes numpy arrays, torch tensors and other memory at offsets of a file; `wait`
waits for one, some or all of its requests. Below it, `open_engine` gives an `Engine` that moves bytes
between addresses and descriptors; `StorageFile` is a preallocated file to use it on.
"""

from __future__ import annotations

from tiermem.errors import ConfigError, TierIOError
from tiermem.io.asyncfile import AsyncFile, open_file
from tiermem.io.backends import BACKENDS, WORKS, open_engine, probe_backends
from tiermem.io.base import (
    Engine,
    EngineStats,
    Fault,
    FaultKind,
    Op,
    Priority,
    QueueOptions,
    Request,
)
from tiermem.io.buffers import AlignedBuffer, aligned_buffer
from tiermem.io.files import StorageFile
from tiermem.io.latency import Latency
from tiermem.io.transfer import Transfer, wait

__all__ = [
    "BACKENDS",
    "WORKS",
    "AlignedBuffer",
    "AsyncFile",
    "ConfigError",
    "Engine",
    "EngineStats",
    "Fault",
    "FaultKind",
    "Latency",
    "Op",
    "Priority",
    "QueueOptions",
    "Request",
    "StorageFile",
    "TierIOError",
    "Transfer",
    "aligned_buffer",
    "open_engine",
    "open_file",
    "probe_backends",
    "wait",
]
