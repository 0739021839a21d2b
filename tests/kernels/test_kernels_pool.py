"""The threads: callers take turns, a fork neither hangs nor computes something else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from tiermem.kernels import Kernels, open_kernels

FORK = """
    import os, sys, threading, torch
    from tiermem.kernels import open_kernels

    def norm(kernels):
        # no torch operation here: torch's own threads do not survive a fork
        return kernels.accumulate(destination, source, add=False)

    source, destination = torch.arange(700_000, dtype=torch.float32), torch.zeros(700_000)
    kernels = open_kernels("auto", 3)
    expected = norm(kernels)
    stop = threading.Event()

    def keep_busy():  # so that the locks are most likely held at the moment of the fork
        other = torch.zeros(700_000)
        while not stop.is_set():
            kernels.accumulate(other, source, add=False)

    # While one is inside others wait for its locks, without the GIL.
    busy = [threading.Thread(target=keep_busy) for _ in range(3)]
    for thread in busy:
        thread.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            right = norm(kernels) == expected
            kernels.close()
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    for thread in busy:
        thread.join()
    assert norm(kernels) == expected
    kernels.close()
    print("done")
"""


def test_fork(native: dict[str, Kernels]) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORK)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.stdout.strip() == "done", result.stderr


def test_callers_take_turns(native: dict[str, Kernels]) -> None:
    kernels = next(iter(native.values()))
    wrong: list[int] = []

    def work(seed: int) -> None:
        source = torch.randn(200_000, generator=torch.Generator().manual_seed(seed))
        with open_kernels(kernels.name, 1) as alone:
            expected = alone.accumulate(torch.zeros(source.numel()), source, add=True)
        for _ in range(50):
            result = torch.zeros(source.numel())
            if kernels.accumulate(result, source, add=True) != expected or not torch.equal(
                result, source
            ):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_opening_and_closing_leaves_no_threads(native: dict[str, Kernels]) -> None:
    def count() -> int:
        names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
        return sum(name.exists() and name.read_text() == "tm_kernel\n" for name in names)

    before = count()
    for _ in range(20):
        with open_kernels("auto", 4) as kernels:
            kernels.accumulate(torch.zeros(300_000), torch.zeros(300_000), add=True)
            assert count() == before + 3
        # A joined thread may be listed for a moment longer.
        deadline = time.monotonic() + 10
        while count() != before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert count() == before


def test_unclosed_kernels_warn(native: dict[str, Kernels]) -> None:
    kernels = open_kernels("auto", 1)
    with pytest.warns(ResourceWarning, match="unclosed kernels"):
        del kernels
