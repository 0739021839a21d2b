"""What host memory there is, and whether a budget can be kept without swapping."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from tiermem.errors import BudgetError
from tiermem.types import ALIGNMENT, format_bytes

DEFAULT_SHARE = 0.8
"""How much of the available memory budgets may take; the rest is for the page cache and others."""

DEFAULT_RESERVE = 1 << 30
"""Bytes kept back per process for the interpreter, torch and the user's own objects."""

_UNLIMITED = 1 << 60
"""Bytes; cgroup v1 writes "no limit" as 2**63 less a page."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. ``available`` is what can be had now without swapping, the cgroup's limit considered.

    ``cgroup_limit`` and ``cgroup_used`` belong to the group that leaves least; None without a limit.
    ``source`` says what bound ``available``: ``machine`` or the path of the cgroup's limit.
    """

    total: int
    available: int
    cgroup_limit: int | None
    cgroup_used: int | None
    source: str


@dataclass(frozen=True, slots=True)
class _GroupLimit:
    limit: int
    used: int
    source: str


def available_host_memory(
    *, proc_cgroup: Path = Path("/proc/self/cgroup"), cgroup_root: Path = Path("/sys/fs/cgroup")
) -> HostMemory:
    """What the machine and the control groups (v1 and v2, with all ancestors) leave."""
    machine = psutil.virtual_memory()
    total, available, source = int(machine.total), int(machine.available), "machine"
    groups = list(_group_limits(proc_cgroup, cgroup_root))
    if not groups:
        return HostMemory(total, available, None, None, source)
    tightest = min(groups, key=lambda group: group.limit - group.used)
    left = max(0, tightest.limit - tightest.used)
    if left < available:
        available, source = left, tightest.source
    total = min(total, min(group.limit for group in groups))
    return HostMemory(total, available, tightest.limit, tightest.used, source)


def local_rank_count(environment: Mapping[str, str] | None = None) -> int:
    """How many ranks share this machine: LOCAL_WORLD_SIZE, or 1."""
    text = (os.environ if environment is None else environment).get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.strip().isdigit() else 1


def default_host_budget(
    local_ranks: int | None = None,
    *,
    reserve: int = DEFAULT_RESERVE,
    memory: HostMemory | None = None,
) -> int:
    """Bytes for one rank: its part of `DEFAULT_SHARE` of what is available, less ``reserve``.

    Raises `BudgetError` if nothing is left.
    """
    ranks = local_rank_count() if local_ranks is None else local_ranks
    memory = memory or available_host_memory()
    budget = int(memory.available * DEFAULT_SHARE / ranks) - reserve
    if budget < ALIGNMENT:
        raise BudgetError(
            f"no host memory is left for a default budget: {memory.available} bytes "
            f"({format_bytes(memory.available)}) are available (bound by {memory.source}) for {ranks} "
            f"local ranks, and each keeps {format_bytes(reserve)} back; free memory, run fewer ranks, "
            f"or set host_memory"
        )
    return budget // ALIGNMENT * ALIGNMENT


def check_host_budget(
    nbytes: int,
    local_ranks: int | None = None,
    *,
    memory: HostMemory | None = None,
    what: str = "host_memory",
) -> None:
    """Raises `BudgetError` if ``nbytes`` on each local rank would swap (exceed what is available).
    ``what``: the keys of the configuration that ask for it."""
    ranks = local_rank_count() if local_ranks is None else local_ranks
    memory = memory or available_host_memory()
    needed = nbytes * ranks
    if needed > memory.available:
        raise BudgetError(
            f"a host budget of {nbytes} bytes on {ranks} local ranks needs {needed} bytes "
            f"({format_bytes(needed)}), but {memory.available} bytes "
            f"({format_bytes(memory.available)}) are available without swapping (bound by "
            f"{memory.source}). Remedy: {what} of at most {memory.available // ranks} bytes, or free "
            f"memory"
        )


def _group_limits(proc_cgroup: Path, root: Path) -> Iterator[_GroupLimit]:
    try:
        lines = proc_cgroup.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = root if (root / "cgroup.controllers").exists() else root / "unified"
            yield from _walk(base, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            yield from _walk(
                base, group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _walk(base: Path, group: str, limit: str, used: str, cache: str) -> Iterator[_GroupLimit]:
    """The limits of ``group`` and its ancestors. In a container the path in /proc may be the host's
    and not exist below the mount; then only the levels that exist, at least the root, are read."""
    relative = PurePosixPath(group.lstrip("/"))
    if ".." in relative.parts:
        relative = PurePosixPath()
    for level in (relative, *relative.parents):
        directory = base / level
        limit_bytes = _number(directory / limit)
        used_bytes = _number(directory / used)
        if limit_bytes is None or used_bytes is None or limit_bytes >= _UNLIMITED:
            continue
        # Clean page cache counts as used but is given back before anything is swapped.
        used_bytes = max(0, used_bytes - _stat(directory / "memory.stat", cache))
        yield _GroupLimit(limit_bytes, used_bytes, str(directory / limit))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0
