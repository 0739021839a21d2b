"""Why a backend of the native engine does not work here, in words and with the remedy."""

from __future__ import annotations

import errno
import os
import resource

_SECCOMP = (
    "a seccomp filter or security module forbids it, as container runtimes do: allow {calls} in the "
    "container's profile, or use another backend"
)
_OPEN_FILES = "too many open files: raise the limit with `ulimit -n` or close some"


def _sysctl(name: str) -> str | None:
    try:
        with open(f"/proc/sys/{name.replace('.', '/')}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def _memlock() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"


def _forbidden_uring() -> str:
    disabled = _sysctl("kernel.io_uring_disabled")
    if disabled == "2":
        return "kernel.io_uring_disabled is 2: set it to 0 with sysctl, or use another backend"
    if disabled == "1":
        return (
            "kernel.io_uring_disabled is 1, which leaves io_uring to privileged processes and to "
            "members of kernel.io_uring_group: join that group, or set it to 0 with sysctl"
        )
    return _SECCOMP.format(calls="io_uring_setup, io_uring_enter and io_uring_register")


def _explain_uring(code: int, depth: int) -> str | None:
    if code == errno.ENOSYS:
        return (
            "it takes Linux 5.6, and linux/io_uring.h when tiermem is installed: install kernel "
            "headers and reinstall tiermem, or use another backend"
        )
    if code in (errno.EPERM, errno.EACCES):
        return _forbidden_uring()
    if code == errno.ENOMEM:
        return (
            f"no memory for a ring of depth {depth}; many kernels count rings as locked memory (the "
            f"limit is {_memlock()}): raise it with `ulimit -l` or lower the queue depths"
        )
    return None


def _explain_libaio(code: int, depth: int) -> str | None:
    if code == errno.EAGAIN:
        used, limit = _sysctl("fs.aio-nr") or "unreadable", _sysctl("fs.aio-max-nr") or "unreadable"
        return (
            f"the kernel has no room for {depth} more asynchronous requests (fs.aio-nr is {used}, "
            f"fs.aio-max-nr is {limit}): raise fs.aio-max-nr with sysctl, lower the queue depths, or "
            "use another backend"
        )
    if code == errno.ENOSYS:
        return "this kernel has no asynchronous I/O (CONFIG_AIO): use another backend"
    if code in (errno.EPERM, errno.EACCES):
        return _SECCOMP.format(calls="io_setup, io_submit and io_getevents")
    return None


def _explain_threads(code: int, depth: int) -> str | None:
    if code == errno.EAGAIN:
        return "no further thread: raise `ulimit -u` or the container's limit on processes"
    return None


_EXPLAIN = {"io_uring": _explain_uring, "libaio": _explain_libaio, "native_threads": _explain_threads}


def explain(backend: str, code: int, depth: int) -> str:
    """Why a queue of ``depth`` chunks cannot be made; ``code`` is the (positive) errno."""
    known = _EXPLAIN[backend](code, depth)
    if known is None and code in (errno.EMFILE, errno.ENFILE):
        known = _OPEN_FILES
    return (
        f"{os.strerror(code)}: {known}" if known else f"{backend} does not start: {os.strerror(code)}"
    )


def explain_memory(backend: str, code: int) -> str:
    """Why memory was not registered (or no more of it); transfers go on without."""
    if code == errno.EOPNOTSUPP:
        return f"{backend} has no use for registered memory"
    if code == errno.ENOMEM:
        return (
            f"the kernel registers no more memory: the limit on locked memory is {_memlock()}; raise "
            "it with `ulimit -l`"
        )
    if code in (errno.ENOSYS, errno.EINVAL):
        return "registering memory piece by piece takes Linux 6.12"
    if code in (errno.EPERM, errno.EACCES):
        return _SECCOMP.format(calls="io_uring_register")
    if code == errno.ENOSPC:
        return "too many ranges of memory are registered"
    return f"the kernel refuses to register memory: {os.strerror(code)}"
