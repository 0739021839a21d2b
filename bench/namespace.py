"""A network of a benchmark's own: its interface's counters have nobody else's bytes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def network_namespace() -> Iterator[tuple[str, ...] | None]:
    """The command prefix that runs a process in a new network namespace with only `lo`; None where
    that is not permitted."""
    name = f"tiermem-bench-{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None or not _ip("netns", "add", name):
        yield None
        return
    try:
        yield ("ip", "netns", "exec", name) if _ip("-n", name, "link", "set", "lo", "up") else None
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0
