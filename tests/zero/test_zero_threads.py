"""Threads of a rank: its part of the cores, unless the user says otherwise. Real processes, some under
torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiermem.zero.threads import num_compute_threads

SLOW = pytest.mark.slow
CORES = len(os.sched_getaffinity(0))
SHOW = """
import json, os, sys
import torch
import tiermem
before = json.loads(sys.argv[2])
if before:
    torch.set_num_threads(before)
config = {"device": "cpu", "host_memory": "8MiB", **json.loads(sys.argv[1])}
with tiermem.Runtime(config) as runtime:
    print(json.dumps([torch.get_num_threads(), runtime.kernels.num_threads]), flush=True)
"""


def threads(
    nproc: int | None, environment: dict[str, str], config: dict[str, int], before: int = 0
) -> list[list[int]]:
    """[torch's, the kernels'] in each process; ``nproc`` under torchrun."""
    command = [sys.executable]
    if nproc is not None:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE")}
    script = Path(environment.pop("script"))
    script.write_text(SHOW)
    done = subprocess.run(
        [*command, str(script), json.dumps(config), json.dumps(before)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("environment", "config", "before", "expected"),
    [
        pytest.param({}, {}, 0, [max(1, CORES // 2)] * 2, id="torchrun's own 1 is not the user's"),
        pytest.param({"OMP_NUM_THREADS": "1"}, {}, 0, [1, 1], id="the user's is", marks=SLOW),
        pytest.param(
            {"OMP_NUM_THREADS": str(CORES)},
            {},
            0,
            [CORES] * 2,
            id="and another",
            marks=SLOW,
        ),
        pytest.param({}, {"num_threads": 5}, 0, [5, 5], id="configured", marks=SLOW),
        pytest.param({}, {}, 7, [7, max(1, CORES // 2)], id="torch's was set", marks=SLOW),
    ],
)
def test_under_torchrun(
    environment: dict[str, str],
    config: dict[str, int],
    before: int,
    expected: list[int],
    tmp_path: Path,
) -> None:
    found = threads(2, {**environment, "script": str(tmp_path / "show.py")}, config, before)
    assert found == [expected, expected]


def test_one_process_leaves_torch_as_it_is(tmp_path: Path) -> None:
    script = {"script": str(tmp_path / "show.py")}
    assert threads(None, dict(script), {}, 3) == [[3, CORES]]
    assert threads(None, {**script, "OMP_NUM_THREADS": "1"}, {}) == [[1, 1]]


def test_whose_the_variable_is(tmp_path: Path) -> None:
    """What torchrun was started with decides; where that cannot be read, 1 is taken for torchrun's."""
    parent = tmp_path / str(os.getppid())
    parent.mkdir()
    share = max(1, CORES // 4)
    under = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4"}
    for number, unreadable in (("1", share), ("9", 9)):
        environment = {**under, "OMP_NUM_THREADS": number}
        (parent / "environ").unlink(missing_ok=True)
        assert num_compute_threads(environment, proc=tmp_path) == unreadable
        (parent / "environ").write_bytes(b"A=b\0OMP_NUM_THREADS=%s\0" % number.encode())
        assert num_compute_threads(environment, proc=tmp_path) == int(number)
        (parent / "environ").write_bytes(b"A=b\0")
        assert num_compute_threads(environment, proc=tmp_path) == share
    assert num_compute_threads({"LOCAL_WORLD_SIZE": "2"}) == max(1, CORES // 2)
    assert num_compute_threads({"OMP_NUM_THREADS": "2,1"}) == 2
    assert num_compute_threads({}) == CORES
