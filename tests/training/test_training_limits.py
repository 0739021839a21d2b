"""Training where the system gives little, or the drive goes away: the same bits, or an error that says
which path. Never a hang."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training_rig import Recipe, batches, run_directories, run_steps, sharded, tier_config, train

from tiermem.errors import StateError, TierIOError, TierMemError
from tiermem.io import Fault, FaultKind, Op, probe_backends

Drives = Callable[[int], list[str]]
pytestmark = pytest.mark.timeout(150)

SECCOMP = Path(__file__).parents[1] / "io" / "seccomp.py"
IO_SETUP = {"x86_64": 206, "aarch64": 0}.get(platform.machine())
IO_URING_SETUP = 425
PR_CAPBSET_DROP = 24
LITTLE_MEMORY = 64 << 10
FEW_DESCRIPTORS = 64
EXT4_SHUTDOWN, AT_ONCE = 0x8004587D, 2
BACKENDS = ("io_uring", "libaio", "native_threads", "threads")


def on_nvme(paths: list[str], **changes: Any) -> dict[str, Any]:
    return tier_config(params="nvme", optimizer="nvme", paths=paths, resident_memory=0, **changes)


def limited() -> None:
    """For a child: 64 KiB of lockable memory without the capability that lifts it, 64 descriptors."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LITTLE_MEMORY, LITTLE_MEMORY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))


TRAIN = """
forbid([int(number) for number in sys.argv[2:]], 1) if sys.argv[2:] else None
import torch, tiermem, training_rig
torch.set_num_threads(1)
config = training_rig.tier_config(params="nvme", optimizer="nvme", paths=[sys.argv[1]],
                                  resident_memory=0, pin_memory=True, io={"backend": "auto"})
with tiermem.Runtime(config) as runtime:
    name = runtime.engine.name
print(name, training_rig.train(config, training_rig.Recipe(steps=2)).digest)
"""


@pytest.mark.skipif(IO_SETUP is None, reason="the numbers of its system calls are not known")
@pytest.mark.parametrize(
    ("expected", "forbidden"),
    [
        ("io_uring", []),
        ("libaio", [IO_URING_SETUP]),
        ("native_threads", [IO_URING_SETUP, IO_SETUP]),
    ],
)
def test_little_memory_few_descriptors_and_forbidden_calls(
    expected: str, forbidden: list[int], drives: Drives, python_env: dict[str, str]
) -> None:
    paths = drives(1)
    if probe_backends(paths[0])[expected] != "works":
        pytest.skip(f"{expected} does not work here")
    done = subprocess.run(
        [sys.executable, "-c", SECCOMP.read_text() + TRAIN, paths[0], *map(str, forbidden)],
        env=python_env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limited,
    )
    if done.stderr.startswith("SKIP "):
        pytest.skip(done.stderr[5:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected, train(on_nvme(paths), Recipe(steps=2)).digest]
    assert run_directories(paths) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_of_a_step_names_the_place(code: int, backend: str, drives: Drives) -> None:
    paths = drives(1)
    if probe_backends(paths[0])[backend] != "works":
        pytest.skip(f"{backend} does not work here")
    recipe = Recipe(steps=1)
    with sharded(on_nvme(paths, io={"backend": backend}), recipe) as (runtime, model, optimizer):
        runtime.drain()
        runtime.engine.inject(Fault(Op.WRITE, 2, FaultKind.ERROR, code))
        with pytest.raises(TierIOError) as caught:
            run_steps(model, optimizer, recipe)
            runtime.drain()
        assert caught.value.errno == code
        assert caught.value.context.path.startswith(paths[0])
        assert caught.value.context.record
    assert run_directories(paths) == []


def test_a_path_that_vanishes_under_an_open_run(drives: Drives) -> None:
    """The files live on without their names; the end is quiet."""
    paths = drives(2)
    recipe = Recipe(steps=3)
    expected = train(on_nvme(paths), recipe).losses
    with sharded(on_nvme(paths), recipe) as (_, model, optimizer):
        losses = run_steps(
            model, optimizer, recipe, on_step=lambda step: shutil.rmtree(paths[1], ignore_errors=True)
        )
    assert tuple(losses) == expected
    assert not Path(paths[1]).exists()


@pytest.fixture
def drive_to_lose(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own; skips where mounting is not permitted."""
    image, point = tmp_path / "image", tmp_path / "drive"
    image.write_bytes(b"")
    os.truncate(image, 256 << 20)
    point.mkdir()
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(point)]):
        if shutil.which(command[0]) is None or subprocess.run(command, check=False).returncode:
            pytest.skip(f"{command[0]} is not possible here")
    yield point
    subprocess.run(["umount", str(point)], check=True)  # nothing may be open there any more


def lose(point: Path) -> None:
    """From now on every transfer there fails."""
    handle = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(handle, EXT4_SHUTDOWN, struct.pack("I", AT_ONCE))
    finally:
        os.close(handle)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_drive_that_goes_away(backend: str, drives: Drives, drive_to_lose: Path) -> None:
    if probe_backends(drive_to_lose)[backend] != "works":
        pytest.skip(f"{backend} does not work here")
    kept = drives(1)
    recipe = Recipe(steps=1)
    config = on_nvme([*kept, str(drive_to_lose)], stripe_bytes=16 << 10, io={"backend": backend})
    raised: list[TierMemError] = []
    try:
        with sharded(config, recipe) as (runtime, model, optimizer):
            run_steps(model, optimizer, recipe)
            runtime.drain()
            lose(drive_to_lose)
            for _ in range(3):  # again and again: each is refused, none hangs
                try:
                    model(*batches(1)[0]).backward()
                    optimizer.step()
                    runtime.drain()
                except (TierIOError, StateError) as error:
                    raised.append(error)
    except TierMemError as error:
        raised.append(error)  # of close
    assert len(raised) >= 3
    assert isinstance(raised[0], TierIOError)
    assert raised[0].context.path.startswith(str(drive_to_lose))
    assert run_directories(kept) == []
