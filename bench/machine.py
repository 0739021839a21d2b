"""What the benchmarks say of the machine that they ran on."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path


def processor() -> str:
    """The processor's name, or the architecture where the kernel does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.machine()
