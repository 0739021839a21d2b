"""Where the system forbids or limits a backend, another serves and the reason is said."""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tiermem.io as tio

pytest.importorskip("tiermem._native", reason="the native core is not built")

from tiermem.io import refusals

ROOT = Path(__file__).resolve().parents[2]
IO_SETUP = {"x86_64": 206, "aarch64": 0}.get(platform.machine(), -1)
IO_URING_SETUP, IO_URING_ENTER, IO_URING_REGISTER = 425, 426, 427
PR_CAPBSET_DROP = 24
FEW_DESCRIPTORS = 64
LITTLE_MEMORY = 64 << 10

FORBID = Path(__file__).with_name("seccomp.py").read_text()

TRANSFER = """
import os, sys, tiermem.io as tio

def transfer(engine, directory):
    queue = engine.add_queue(tio.QueueOptions(65536, 4, 4))
    data = os.urandom(1 << 20)
    with open(os.path.join(directory, "f"), "w+b") as file, tio.aligned_buffer(2 << 20) as buffer:
        with buffer.view[: 1 << 20] as view:
            view[:] = data
        engine.register(buffer.address, 2 << 20)
        engine.submit(queue, tio.Op.WRITE, file.fileno(), 0, buffer.address, 1 << 20).wait()
        second = buffer.address + (1 << 20)
        engine.submit(queue, tio.Op.READ, file.fileno(), 0, second, 1 << 20).wait()
        with buffer.view[1 << 20 :] as view:
            assert bytes(view) == data
    return engine
"""


def little_memory() -> None:
    """For a child: 64 KiB of lockable memory, and no capability that lifts the limit."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LITTLE_MEMORY, LITTLE_MEMORY))


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))


def run(code: str, *arguments: str, before: Callable[[], None] | None = None) -> str:
    """Runs a program after ``before`` in the child; what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", FORBID + TRANSFER + code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=before,
    )
    if result.stderr.startswith("SKIP "):
        pytest.skip(result.stderr[5:])
    assert result.returncode == 0, result.stderr
    return result.stdout


def works(backend: str, directory: Path) -> bool:
    return tio.probe_backends(directory)[backend] == "works"


AUTO = """
forbid([int(number) for number in sys.argv[3].split(",")], int(sys.argv[2]))
engine = transfer(tio.open_engine("auto", sys.argv[1]), sys.argv[1])
print(engine.name)
print(engine.reason)
print(engine.registration)
engine.close()
"""


@pytest.mark.skipif(IO_SETUP < 0, reason="the numbers of its system calls are not known")
@pytest.mark.parametrize(
    ("forbidden", "code", "words"),
    [
        ([IO_URING_SETUP], errno.EPERM, "io_uring: Operation not permitted: a seccomp filter"),
        ([IO_URING_ENTER], errno.EPERM, "io_uring: Operation not permitted: a seccomp filter"),
        ([IO_URING_SETUP], errno.ENOSYS, "it takes Linux 5.6"),
        ([IO_URING_SETUP], errno.ENOMEM, "raise it with `ulimit -l`"),
        ([IO_URING_SETUP], errno.EINVAL, "io_uring does not start: Invalid argument"),
        ([IO_URING_SETUP, IO_SETUP], errno.EPERM, "allow io_setup, io_submit and io_getevents"),
        ([IO_URING_SETUP, IO_SETUP], errno.EAGAIN, "fs.aio-max-nr"),
    ],
)
def test_another_serves(tmp_path: Path, forbidden: list[int], code: int, words: str) -> None:
    disabled = Path("/proc/sys/kernel/io_uring_disabled")
    if disabled.exists() and disabled.read_text().strip() != "0":
        pytest.skip("io_uring is forbidden by more than the filter")
    output = run(AUTO, str(tmp_path), str(code), ",".join(map(str, forbidden)))
    name, reason, *_ = output.splitlines()
    assert name == ("native_threads" if IO_SETUP in forbidden else "libaio")
    assert words in reason
    assert reason.endswith(f"{name}: a write and a read succeeded")


def test_registering_is_forbidden(tmp_path: Path) -> None:
    if not works("io_uring", tmp_path):
        pytest.skip("io_uring does not work here")
    name, _, registration = run(
        AUTO, str(tmp_path), str(errno.EPERM), str(IO_URING_REGISTER)
    ).splitlines()
    assert name == "io_uring"
    assert registration.startswith("0 bytes")
    assert "allow io_uring_register" in registration or "takes Linux" in registration


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EAGAIN, errno.EBUSY])
def test_refused_batches_leave_nothing_in_the_ring(tmp_path: Path, code: int) -> None:
    """What the kernel did not take is not submitted with the next request."""
    script = """
forbid_batches(426, 2, int(sys.argv[2]))
engine = tio.open_engine("io_uring")
queue = engine.add_queue(tio.QueueOptions(4096, 4, 4))
data = os.urandom(8192)
with open(sys.argv[1] + "/f", "w+b") as file, tio.aligned_buffer(1 << 20) as buffer:
    file.write(data)
    file.flush()
    for _ in range(2 if int(sys.argv[2]) == 22 else 1):  # others are tried again for a second
        buffer.fill(7)
        request = engine.submit(queue, tio.Op.READ, file.fileno(), 0, buffer.address + 65536, 4 * 4096)
        try:
            request.wait(30)
            sys.exit("the batch was taken")
        except OSError as error:
            print(error.errno)
        buffer.fill(9)
        engine.submit(queue, tio.Op.READ, file.fileno(), 0, buffer.address, 4096).wait(30)
        engine.submit(queue, tio.Op.READ, file.fileno(), 4096, buffer.address + 4096, 4096).wait(30)
        with buffer.view as view:
            assert bytes(view[:8192]) == data
            assert bytes(view[8192:]) == b"\\x09" * (len(view) - 8192)
engine.close()
"""
    if not works("io_uring", tmp_path) or sys.byteorder != "little":
        pytest.skip("it does not work here")
    seen = run(script, str(tmp_path), str(code)).split()
    # Busy is told from completions that wait to be fetched, of which there are none here.
    assert set(seen) == {str(errno.EAGAIN if code == errno.EBUSY else code)}


def test_named_backend_is_not_replaced(tmp_path: Path) -> None:
    code = """
forbid([425], 1)
try:
    tio.open_engine("io_uring")
except tio.ConfigError as error:
    print(error)
"""
    output = run(code)
    assert output.startswith("backend io_uring does not work: Operation not permitted")
    assert output.endswith("backend 'auto' picks another\n")


@pytest.mark.parametrize("backend", tio.BACKENDS)
def test_little_lockable_memory(tmp_path: Path, backend: str) -> None:
    code = """
engine = transfer(tio.open_engine(sys.argv[2]), sys.argv[1])
print(engine.registration)
engine.close()
"""
    if not works(backend, tmp_path):
        pytest.skip("it does not work here")
    output = run(code, str(tmp_path), backend, before=little_memory)
    if backend == "io_uring":
        assert output.startswith("0 bytes")
        assert "the limit on locked memory is 65536 bytes" in output or "takes Linux" in output
    else:
        assert "no use for registered memory" in output


@pytest.mark.parametrize("backend", tio.BACKENDS)
def test_few_descriptors(tmp_path: Path, backend: str) -> None:
    """Queues are refused with the remedy when descriptors run out; those there are go on."""
    code = """
engine = tio.open_engine(sys.argv[2])
words = ""
try:
    for _ in range(40):
        engine.add_queue(tio.QueueOptions(4096, 1, 1))
except OSError as error:
    words = str(error)
    try:
        tio.open_engine("io_uring")
    except tio.ConfigError as error:
        words += str(error)
print(words)
engine.close()
transfer(tio.open_engine("auto", sys.argv[1]), sys.argv[1]).close()
if words:
    engine = transfer(tio.open_engine(sys.argv[2]), sys.argv[1])
    engine.close()
"""
    if not works(backend, tmp_path):
        pytest.skip("it does not work here")
    output = run(code, str(tmp_path), backend, before=few_descriptors)
    if backend == "io_uring":
        assert "too many open files: raise the limit with `ulimit -n`" in output
        assert "backend io_uring does not work: Too many open files" in output


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("2", "kernel.io_uring_disabled is 2: set it to 0 with sysctl"),
        ("1", "join that group"),
        ("0", "container's profile"),
        (None, "container's profile"),
    ],
)
def test_switched_off(monkeypatch: pytest.MonkeyPatch, value: str | None, words: str) -> None:
    monkeypatch.setattr(refusals, "_sysctl", lambda name: value)
    assert words in refusals.explain("io_uring", errno.EPERM, 32)


def test_numbers_that_no_rule_knows() -> None:
    assert refusals.explain("libaio", errno.EIO, 2) == "libaio does not start: Input/output error"
    assert "ulimit -u" in refusals.explain("native_threads", errno.EAGAIN, 2)
    assert "aio-max-nr" in refusals.explain("libaio", errno.EAGAIN, 2)
    assert "CONFIG_AIO" in refusals.explain("libaio", errno.ENOSYS, 2)
    assert "Bad address" in refusals.explain_memory("io_uring", errno.EFAULT)


def test_rings_beyond_the_lockable_memory(tmp_path: Path) -> None:
    """Some kernels charge rings to the limit: then that is said, with the remedy."""
    code = """
engine = tio.open_engine("io_uring")
try:
    for _ in range(64):
        engine.add_queue(tio.QueueOptions(4096, 1, 1))
except OSError as error:
    print(error)
engine.close()
"""
    if not works("io_uring", tmp_path):
        pytest.skip("io_uring does not work here")
    output = run(code, before=little_memory)
    assert not output or "raise it with `ulimit -l`" in output
