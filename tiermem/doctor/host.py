"""Host memory: how much, whether it can be locked, huge pages. And descriptors."""

from __future__ import annotations

import ctypes
import os
import resource

import psutil

from tiermem.doctor.finding import Finding, Level
from tiermem.errors import BudgetError
from tiermem.memory.budget import available_host_memory, default_host_budget
from tiermem.memory.mapping import HUGE_PAGE, Mapping
from tiermem.types import ALIGNMENT, format_bytes

_TRIED_PAGES = 4  # huge pages that are mapped to see what the kernel gives
_FEW_DESCRIPTORS = 32  # what a run with one path needs, with room


def _limit(which: int) -> tuple[float, str]:
    soft = resource.getrlimit(which)[0]
    return (float("inf"), "unlimited") if soft == resource.RLIM_INFINITY else (soft, str(soft))


def check_host_memory() -> Finding:
    """What a budget may take."""
    memory = available_host_memory()
    bound = "" if memory.source == "machine" else f", bound by {memory.source}"
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} available{bound}"
    try:
        budget = default_host_budget(memory=memory)
    except BudgetError:
        remedy = "free memory, raise the control group's limit, or set host_memory"
        return Finding("host memory", Level.PROBLEM, f"{text}: no default budget is left", remedy)
    return Finding("host memory", Level.OK, f"{text}; default budget {format_bytes(budget)}")


def check_locking() -> Finding:
    """Whether an arena of the default budget can be locked, by locking address space that stays
    untouched."""
    budget = _default_budget()
    bytes_allowed, shown = _limit(resource.RLIMIT_MEMLOCK)
    if bytes_allowed < float("inf"):
        shown = format_bytes(bytes_allowed)
    error = _lock_error(budget)
    size = format_bytes(budget)
    if not error:
        lifted = "" if bytes_allowed >= budget else ", lifted by CAP_IPC_LOCK"
        text = f"an arena of {size} can be locked (RLIMIT_MEMLOCK {shown}{lifted})"
        return Finding("locked memory", Level.OK, text)
    swap = psutil.swap_memory().total
    may = f"may be swapped out ({format_bytes(swap)} of swap)" if swap else "stays (there is no swap)"
    return Finding(
        "locked memory",
        Level.NOTE,
        f"an arena of {size}, the default budget, cannot be locked whole ({os.strerror(error)}; "
        f"RLIMIT_MEMLOCK is {shown}): what lies beyond it {may}, and io_uring registers none of it",
        "raise the limit: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, LimitMEMLOCK= "
        "of a service, or --ulimit memlock=-1 of a container",
    )


def _default_budget() -> int:
    try:
        return default_host_budget()
    except BudgetError:
        return HUGE_PAGE


def _lock_error(nbytes: int) -> int:
    """0, or why so many bytes cannot be locked; some is tried where less address space is allowed."""
    try:
        mapping = Mapping(nbytes)
    except BudgetError:
        mapping = Mapping(HUGE_PAGE)
    return mapping.lock_on_touch()


def check_pages() -> Finding:
    """Whether memory that asks for huge pages really gets them."""
    mapping = Mapping(_TRIED_PAGES * HUGE_PAGE)
    for offset in range(0, mapping.nbytes, ALIGNMENT):
        ctypes.memset(mapping.address + offset, 1, 1)
    try:
        got = mapping.huge_page_bytes()
    except OSError as error:
        text = f"cannot be seen: /proc/self/smaps: {error.strerror}"
        return Finding("huge pages", Level.NOTE, text, "mount /proc")
    tried = f"{format_bytes(got)} of {format_bytes(mapping.nbytes)} tried lie on them"
    if got == mapping.nbytes:
        return Finding("huge pages", Level.OK, tried)
    # Half the speed of reads was seen without: scattered pages split what goes to the drive.
    level = Level.NOTE if got else Level.PROBLEM
    if mapping.huge_pages != "advised":
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    elif got:
        remedy = "memory is fragmented: echo 1 > /proc/sys/vm/compact_memory, or restart the machine"
    else:
        remedy = (
            "none given though asked for: PR_SET_THP_DISABLE of a parent process, or no free run of "
            "2 MiB (echo 1 > /proc/sys/vm/compact_memory)"
        )
    reason = "" if mapping.huge_pages == "advised" else f" ({mapping.huge_pages})"
    return Finding(
        "huge pages", level, f"{tried}{reason}: transfers are split at pages, and reads slower", remedy
    )


def check_descriptors() -> Finding:
    """Whether there is room for a run's files and rings."""
    limit, shown = _limit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) - 1  # the listing's own
    text = f"{used} of {shown} in use"
    if limit - used >= _FEW_DESCRIPTORS:
        return Finding("open files", Level.OK, text)
    return Finding(
        "open files",
        Level.PROBLEM,
        f"{text}: a run with one path needs up to {_FEW_DESCRIPTORS} more",
        "raise the limit: `ulimit -n 1024`",
    )
