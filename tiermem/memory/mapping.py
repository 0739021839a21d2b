"""`Mapping`: anonymous memory from the kernel, aligned for huge pages.

[Note: fork] The mapping is MADV_DONTFORK. A forked child (a data loader's worker) has neither the
I/O threads nor the right to the run's files, so it can do nothing sensible with this memory; but with
it mapped, every page the parent writes after the fork would be copied, which breaks the budget, and
on kernels before 5.19 a page under O_DIRECT or a driver's DMA could end up in the child instead of
the parent. A child that touches it anyway dies by SIGSEGV instead of computing with stale values.
For the same reason the mapping is made by mmap(2) and not by Python's ``mmap``: that object would
unmap the address range in the child too, where something else may lie by then.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable

from tiermem.errors import BudgetError
from tiermem.types import format_bytes, round_up

HUGE_PAGE = 2 << 20
"""Bytes; the base of every mapping is a multiple of it."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MLOCK_ONFAULT = 1
_THP_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    for name in ("munmap", "mlock", "munlock"):
        getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _unmap(address: int, nbytes: int, owner_pid: int, before: list[Callable[[], None]]) -> None:
    if os.getpid() != owner_pid:
        return  # [Note: fork]
    for action in reversed(before):
        action()
    _libc().munmap(address, nbytes)


class Mapping:
    """``nbytes`` (a multiple of 4096) of zeroed memory at ``address``, touched lazily.

    It is unmapped when the last reference to this object goes: blocks and views hold one, so memory
    that somebody still looks at stays. Raises `BudgetError` if the kernel refuses.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        length = round_up(nbytes, HUGE_PAGE) + HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        base = _libc().mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if base == _MAP_FAILED or base is None:
            raise BudgetError(
                f"the kernel refuses to map {length} bytes ({format_bytes(length)}): "
                f"{os.strerror(ctypes.get_errno())}; give a smaller budget or raise `ulimit -v`"
            )
        self.address = round_up(base, HUGE_PAGE)
        _libc().madvise(base, length, _MADV_DONTFORK)
        refused = _libc().madvise(self.address, round_up(nbytes, HUGE_PAGE), _MADV_HUGEPAGE)
        self.huge_pages = _describe_huge_pages(ctypes.get_errno() if refused else 0)
        self._before_unmap: list[Callable[[], None]] = []
        finalizer = weakref.finalize(self, _unmap, base, length, os.getpid(), self._before_unmap)
        # At interpreter exit I/O threads may still write here; the kernel frees it in time.
        finalizer.atexit = False

    def before_unmap(self, action: Callable[[], None]) -> None:
        """``action`` runs just before the memory goes (unregistering it from a driver)."""
        self._before_unmap.append(action)

    def lock_on_touch(self) -> int:
        """Locks every page from when it is first touched; populates nothing. 0 or an errno."""
        try:
            mlock2 = _libc().mlock2
        except AttributeError:  # C library older than 2.27
            return 38  # ENOSYS
        mlock2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        failed = mlock2(self.address, round_up(self.nbytes, HUGE_PAGE), _MLOCK_ONFAULT)
        return ctypes.get_errno() if failed else 0

    def lock(self, address: int, nbytes: int) -> int:
        """Locks and populates whole pages. 0 or an errno."""
        if not _libc().mlock(address, nbytes):
            return 0
        error = ctypes.get_errno()
        # It may have failed half way (out of memory while populating): leave nothing half locked.
        _libc().munlock(address, nbytes)
        return error

    def huge_page_bytes(self) -> int:
        """Bytes of this mapping that lie on huge pages now (reads /proc/self/smaps)."""
        total, inside = 0, False
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as smaps:
            for line in smaps:
                head = line.split(maxsplit=1)[0]
                if not head.endswith(":"):
                    low, high = (int(part, 16) for part in head.split("-"))
                    inside = low < self.address + self.nbytes and self.address < high
                elif inside and head == "AnonHugePages:":
                    total += int(line.split()[1]) * 1024
        return total


def _describe_huge_pages(errno: int) -> str:
    if errno:
        return f"refused ({os.strerror(errno)})"
    try:
        with open(_THP_SETTING, encoding="ascii") as setting:
            text = setting.read()
    except OSError:
        return "unavailable (no transparent huge pages in this kernel)"
    if "[never]" in text:
        return f"unavailable ({_THP_SETTING} is 'never')"
    return "advised"
