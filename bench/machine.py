"""What the benchmarks say of the machine that they ran on."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
from pathlib import Path


def facts() -> dict[str, object]:
    """What every report says of the machine and the versions; of torch where the benchmark uses it."""
    torch = {"torch": sys.modules["torch"].__version__} if "torch" in sys.modules else {}
    return {
        "kernel": platform.release(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **torch,
    }


def unwind_on_sigterm() -> None:
    """SIGTERM unwinds like Ctrl-C from now on, so that files, mounts, devices and ranks go too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def processor() -> str:
    """The processor's name, or the architecture where the kernel does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.machine()
