"""The counters say what has really moved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from tiermem.comm import CommStats, Kind, Message, Traffic, open_communicator


def _count(rank: int, size: int) -> list[CommStats]:
    comm = open_communicator(None)
    readings = [comm.stats()]
    sends = [torch.zeros(100 + 10 * peer, dtype=torch.bfloat16) for peer in range(size)]
    receives = [torch.zeros(100 + 10 * rank, dtype=torch.bfloat16) for _ in range(size)]
    first = comm.exchange(Message(Kind.PARAMS, 0, "a"), sends, receives)
    more = [torch.zeros(100 + 10 * rank, dtype=torch.bfloat16) for _ in range(size)]
    second = comm.exchange(Message(Kind.PARAMS, 1, "b"), sends, more)
    first.wait()
    second.wait_received()
    second.wait()
    comm.exchange(Message(Kind.PARAMS, 0, "a"), [None] * size, [None] * size).wait()
    readings.append(comm.stats())
    comm.gather_values("norms", [1.0, 2.0, 3.0])
    readings.append(comm.stats())
    comm.close()
    return readings


@pytest.mark.parametrize("size", [1, 2, 4])
def test_exact_counts(size: int) -> None:
    for rank, (before, params, values) in enumerate(run_ranks(_count, size)):
        assert before.by_kind == {kind: Traffic() for kind in Kind}
        sent = 2 * sum(100 + 10 * peer for peer in range(size) if peer != rank)
        received = 2 * (size - 1) * (100 + 10 * rank)
        expected = Traffic(3, 2 * sent, 2 * received, 2 * (sent + received))
        assert params.by_kind[Kind.PARAMS] == expected
        assert params.by_kind[Kind.VALUES] == Traffic()
        assert params.max_in_flight_bytes == 2 * (sent + received)
        small = 24 * (size - 1)
        assert values.by_kind[Kind.VALUES] == Traffic(1, small, small, 2 * small)
        assert values.by_kind[Kind.PARAMS] == expected
        assert values.exchanges == 4
        assert values.sent_bytes == 2 * sent + small
        assert values.received_bytes == 2 * received + small


SCRIPT = """
    from pathlib import Path
    import torch
    from torch import distributed as dist
    from tiermem.comm import Kind, Message, open_communicator

    def loopback_bytes():
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == "lo":
                return int(fields.split()[0])

    dist.init_process_group("gloo")
    comm = open_communicator(None)
    tensors = [[torch.zeros(1 << 20) for _ in range(comm.size)] for _ in range(2)]
    comm.gather_values("start", [])
    comm.exchange(Message(Kind.SETUP, 0, "warm"), *tensors).wait()
    ratios = []
    for _ in range(4):  # TCP may cut what it sends into small segments, each with a header, for a while
        comm.gather_values("all", [0.0])
        before, start = comm.stats(), loopback_bytes()
        comm.gather_values("go", [0.0])  # nobody sends before all have read
        for index in range(8):
            comm.exchange(Message(Kind.PARAMS, index, "big"), *tensors).wait()
        comm.gather_values("all", [0.0])
        moved, after = loopback_bytes() - start, comm.stats()
        sent = after.sent_bytes - before.sent_bytes
        counted = sum(row[0] for row in comm.gather_values("sum", [sent]))
        ratios.append(moved / counted)
    if comm.rank == 0:
        print("RATIO", min(ratios), counted)
    comm.close()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_counts_against_the_network_interface(size: int, tmp_path: Path, repository: Path) -> None:
    """In a network of its own, where nobody else uses the interface."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs unshare and ip")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace (root)")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={size} {script}"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {run}"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    ratio, counted = float(words[words.index("RATIO") + 1]), float(words[words.index("RATIO") + 2])
    assert counted == size * (size - 1) * (8 * (4 << 20) + 16)
    assert 1.0 <= ratio < 1.01  # TCP's headers and acknowledgements, the watches' looks at the store
