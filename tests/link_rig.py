"""A link of a known rate between ranks on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LINK_BYTES_PER_S = 50_000_000  # of all ranks together


def succeeds(*arguments: str) -> bool:
    return subprocess.run(arguments, capture_output=True, check=False).returncode == 0


@contextmanager
def slow_link() -> Iterator[tuple[str, ...]]:
    """The command prefix that runs a process in a network namespace in which loopback has that rate.
    Skips the test where that is not permitted."""
    name = f"tiermem-link-{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("tc") is None or not succeeds("ip", "netns", "add", name):
        pytest.skip("needs root, and network namespaces with tc (iproute2)")
    try:
        inside = ("ip", "netns", "exec", name)
        rate = f"{8 * LINK_BYTES_PER_S}bit"
        limit = ("tbf", "rate", rate, "burst", "128kb", "latency", "1s")
        if not succeeds(*inside, "ip", "link", "set", "lo", "up") or not succeeds(
            *inside, "tc", "qdisc", "add", "dev", "lo", "root", *limit
        ):
            pytest.skip("the kernel has no token bucket filter (sch_tbf)")
        yield inside
    finally:
        succeeds("ip", "netns", "del", name)


def torchrun_on_slow_link(*program: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` (a file and its arguments) by torchrun on such a link."""
    launch = ("torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1")
    with slow_link() as inside:
        command = [*inside, sys.executable, "-m", *launch, *program]
        here = os.pathsep.join(path for path in sys.path if path)  # a test's helpers lie beside it
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": here},
        )
