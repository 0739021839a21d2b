"""Freed memory goes back to the system where that was asked for."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent(
    """
    import sys
    import psutil, torch, tiermem

    config = {"host_memory": "16MiB", "pin_memory": False}
    if sys.argv[1]:
        config["malloc_mmap_threshold"] = sys.argv[1]
    with tiermem.Runtime(config):
        torch.ones(2 << 20)  # freed: glibc raises its own threshold to 8 MiB
        before = psutil.Process().memory_info().rss
        blocks = [torch.ones(3 << 19) for _ in range(40)]  # 6 MiB each
        del blocks[:-1]  # the last one keeps the heap from shrinking
        print(psutil.Process().memory_info().rss - before)
    """
)


def kept(threshold: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, threshold], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_blocks_above_the_threshold_are_returned_at_once() -> None:
    if kept("") < 100 << 20:
        pytest.skip("this C library returns such blocks by itself")
    assert kept("4MiB") < 20 << 20
