"""Part of the suite without any privilege and with the usual limit on locked memory."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMLOCK_BYTES = 8 << 20
PR_CAPBSET_DROP = 24
PART = [
    "tests/memory",
    "tests/store/test_store_roundtrip.py",
    "tests/store/test_store_rundir.py",
    "tests/io/test_io_order.py",
    "tests/io/test_io_memory.py",
    "tests/cli/test_bench_runs.py",
    "tests/cli/test_tune_runs.py::test_it_finds_says_how_sure_and_saves",
    "tests/tuning/test_tuning_choice.py",
    "tests/training/test_training_bytes.py",
    "tests/zero/test_zero_deferred.py",
]


def drop_privileges() -> None:
    """For the child, before exec: root then keeps its name, but no capability."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    limit = MEMLOCK_BYTES if hard == resource.RLIM_INFINITY else min(MEMLOCK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in range(64):  # those that the kernel does not know fail
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def run(arguments: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        preexec_fn=drop_privileges,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_privileges() -> None:
    status = run(["-c", "print(open('/proc/self/status').read())"], 60).stdout
    found = re.search(r"CapEff:\s*([0-9a-f]+)", status)
    assert found is not None
    if int(found[1], 16):
        pytest.skip("capabilities cannot be dropped here")
    result = run(["-m", "pytest", "-p", "no:cacheprovider", "--no-header", *PART], 280)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert re.search(r"\d{2,} passed", result.stdout)
