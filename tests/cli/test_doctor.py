"""`tiermem doctor`: each finding is provoked for real, in a process that lacks what it is about."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
IO_SETUP = {"x86_64": 206, "aarch64": 0}.get(platform.machine(), -1)
IO_URING_SETUP, IO_URING_REGISTER = 425, 427
PR_CAPBSET_DROP, PR_SET_THP_DISABLE = 24, 41
NO_TORCH = "sys.modules['torch'] = None\nimport importlib.metadata as m\n" + (
    "def version(name, real=m.version):\n"
    "    if name == 'torch': raise m.PackageNotFoundError(name)\n"
    "    return real(name)\n"
    "m.version = version\n"
)
QUICK = (
    "import types; sys.modules['torch'] = t = types.ModuleType('torch'); t.__version__ = '9.9'\n"
    + ("t.accelerator = types.SimpleNamespace(current_accelerator=lambda: None)\n")
)
"""Importing torch takes seconds: a stand-in without an accelerator."""

Doctor = Callable[..., "Answer"]


class Answer:
    """What one run said: the exit code, and the findings by topic (and path, where given)."""

    def __init__(self, code: int, answer: dict[str, Any]) -> None:
        self.code = code
        self.answer = answer
        assert answer["works"] == (code == 0)
        levels = [one["level"] for one in answer["findings"]]
        assert answer["works"] == ("problem" not in levels)
        assert answer["counts"] == {level: levels.count(level) for level in ("ok", "note", "problem")}

    def get(self, topic: str, path: Path | None = None) -> dict[str, str]:
        found = [
            one
            for one in self.answer["findings"]
            if one["topic"] == topic and (path is None or one["path"] == str(path))
        ]
        assert len(found) == 1, (topic, self.answer)
        return dict(found[0])

    def check(self, topic: str, level: str, *words: str, path: Path | None = None) -> None:
        one = self.get(topic, path)
        assert one["level"] == level, one
        for word in words:
            assert word in one["text"] + " -> " + one["remedy"], one
        assert one["remedy"] or level == "ok", one

    @property
    def problems(self) -> set[str]:
        return {one["topic"] for one in self.answer["findings"] if one["level"] == "problem"}


@pytest.fixture
def doctor(tmp_path: Path, plain_environment: dict[str, str]) -> Doctor:
    """Runs the command in a process of its own, after ``code`` there and ``before`` its exec."""

    def run(
        *paths: Path, code: str = "", torch: str = QUICK, before: Callable[[], None] | None = None
    ) -> Answer:
        filters = (REPOSITORY / "tests/io/seccomp.py").read_text()
        end = "\nfrom tiermem.cli.app import run\nsys.exit(run(['doctor', '--json', *sys.argv[1:]]))"
        done = subprocess.run(
            [sys.executable, "-c", filters + torch + code + end, *map(str, paths or (tmp_path,))],
            cwd=REPOSITORY,
            env=plain_environment,
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=before,
        )
        if done.stderr.startswith("SKIP "):
            pytest.skip(done.stderr[5:])
        assert done.stderr == "", done.stderr
        assert done.returncode in (0, 1)
        return Answer(done.returncode, json.loads(done.stdout))

    return run


def drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def require(answer: Answer, *topics: str) -> None:
    """Skips where this machine lacks already what a test is going to take away."""
    for topic in topics:
        if answer.get(topic)["level"] != "ok":
            pytest.skip(f"{topic}: {answer.get(topic)['text']}")


def test_facts(doctor: Doctor, tmp_path: Path) -> None:
    answer = doctor()
    answer.check("system", "ok", platform.release(), platform.machine())
    answer.check("threads", "ok", path=tmp_path)
    answer.check("open files", "ok", "in use")
    answer.check("device", "note", "torch finds no accelerator")
    assert "available" in answer.get("host memory")["text"]
    assert "fs.aio-max-nr" in answer.get("aio requests")["text"]
    assert "free" in answer.get("directory")["text"]
    assert list(tmp_path.iterdir()) == []


def test_native_core_hidden(doctor: Doctor) -> None:
    answer = doctor(code="sys.modules['tiermem._native'] = None\n")
    answer.check("native core", "problem", "several times slower", "reinstall tiermem")
    for backend in ("io_uring", "libaio", "native_threads"):
        answer.check(backend, "note", "needs the native core", "see native core")
    answer.check("threads", "ok", "'auto' takes it")
    answer.check("backends", "problem", "only Python threads work")
    assert answer.code == 1


def test_no_compiler(doctor: Doctor) -> None:
    code = "import os; os.environ['CC'] = '/nowhere/cc -O'; sys.modules['tiermem._native'] = None\n"
    words = "install a C compiler (/nowhere/cc is not found)"
    doctor(code=code).check("native core", "problem", words)


def test_no_torch(doctor: Doctor) -> None:
    answer = doctor(torch=NO_TORCH)
    answer.check("torch", "problem", "nothing can be trained", "pip install '.[train]'")
    assert all(one["topic"] != "device" for one in answer.answer["findings"])


def test_old_and_broken_torch(doctor: Doctor, tmp_path: Path) -> None:
    old = QUICK + "t.__version__ = '2.3.1+cpu'\n"
    doctor(torch=old).check("torch", "problem", "older than 2.9", "torch>=2.9")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise OSError('libcudart.so: cannot open')")
    broken = "sys.path.insert(0, sys.argv[1])\n"
    doctor(torch=broken).check("torch", "problem", "does not load: OSError: libcudart.so", "reinstall")


def test_the_real_torch(doctor: Doctor) -> None:
    torch = pytest.importorskip("torch")
    answer = doctor(torch="")
    answer.check("torch", "ok", torch.__version__)
    assert answer.get("device")["level"] == ("ok" if torch.accelerator.is_available() else "note")


@pytest.mark.skipif(IO_SETUP < 0, reason="the numbers of its system calls are not known")
def test_io_uring_forbidden(doctor: Doctor) -> None:
    require(doctor(), "io_uring", "libaio")
    answer = doctor(code=f"forbid([{IO_URING_SETUP}], {errno.EPERM})\n")
    answer.check("io_uring", "note", "a seccomp filter", "allow io_uring_setup")
    answer.check("libaio", "ok", "'auto' takes it")
    assert all(one["topic"] != "io_uring memory" for one in answer.answer["findings"])
    answer = doctor(code=f"forbid([{IO_URING_SETUP}, {IO_SETUP}], {errno.EPERM})\n")
    answer.check("libaio", "note", "allow io_setup, io_submit and io_getevents")
    answer.check("native_threads", "ok", "'auto' takes it")
    answer = doctor(code=f"forbid([{IO_URING_SETUP}], {errno.ENOSYS})\n")
    answer.check("io_uring", "note", "it takes Linux 5.6", "install kernel headers")
    answer = doctor(code=f"forbid([{IO_SETUP}], {errno.EAGAIN})\n")
    answer.check("libaio", "note", "fs.aio-nr is", "raise fs.aio-max-nr with sysctl")


def test_registering_forbidden(doctor: Doctor) -> None:
    require(doctor(), "io_uring", "io_uring memory")
    answer = doctor(code=f"forbid([{IO_URING_REGISTER}], {errno.EPERM})\n")
    answer.check("io_uring", "ok")
    answer.check("io_uring memory", "note", "a seccomp filter", "allow io_uring_register")


def test_little_lockable_memory(doctor: Doctor) -> None:
    def before() -> None:
        drop_capabilities()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))

    answer = doctor(before=before)
    answer.check("locked memory", "note", "RLIMIT_MEMLOCK is 64.0 KiB", "ulimit -l unlimited")
    if answer.get("io_uring")["level"] == "ok":
        assert answer.get("io_uring memory")["level"] == "note"
    assert "locked memory" not in answer.problems


def test_no_huge_pages(doctor: Doctor) -> None:
    def before() -> None:
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

    require(doctor(), "huge pages")
    answer = doctor(before=before)
    answer.check("huge pages", "problem", "0 B of 8.0 MiB", "PR_SET_THP_DISABLE")
    assert answer.code == 1


def test_few_descriptors(doctor: Doctor) -> None:
    def before() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    answer = doctor(before=before)
    answer.check("open files", "problem", "of 24 in use", "ulimit -n")


def test_no_descriptor_for_a_ring(doctor: Doctor) -> None:
    require(doctor(), "io_uring")
    # Three more than are open: enough for the file of a trial, not for a ring with its eventfd, too.
    code = (
        "import os, resource\nimport tiermem.doctor.backends, tiermem.doctor.directories\n"
        "real = tiermem.doctor.backends.check_backends\n"
        "def check(path):\n"
        "    used = len(os.listdir('/proc/self/fd')) - 1\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, 1024))\n"
        "    try:\n        return real(path)\n"
        "    finally:\n        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n"
        "tiermem.doctor.backends.check_backends = check\n"
    )

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

    doctor(code=code, before=before).check("io_uring", "note", "too many open files", "ulimit -n")


@pytest.mark.parametrize("limit", [8, 10, 12])
def test_too_few_descriptors_to_look(doctor: Doctor, limit: int) -> None:
    """Not even the checks can open what they need: that is said, not raised."""
    code = (
        "import resource, tiermem.cli.app, tiermem.doctor.accelerator, tiermem.doctor.backends\n"
        "import tiermem.doctor.directories, tiermem.doctor.system, tiermem.doctor.host\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
    )
    answer = doctor(code=code)
    assert answer.code == 1
    assert "open files" in answer.problems


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="/dev/shm is no file system of its own")
def test_tmpfs(doctor: Doctor, tmp_path: Path) -> None:
    answer = doctor(Path("/dev/shm"), tmp_path)
    answer.check("directory", "problem", "tmpfs", "outside of the budget", path=Path("/dev/shm"))
    assert answer.get("threads", Path("/dev/shm"))["level"] == "ok"  # looked at all the same
    assert answer.get("directory", tmp_path)["level"] != "problem"
    assert answer.code == 1


def test_unusable_directories(doctor: Doctor, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    (tmp_path / "file").write_text("")
    absent = tmp_path / "absent"
    answer = doctor(absent, locked, tmp_path / "file", tmp_path, before=drop_capabilities)
    answer.check("directory", "problem", "does not exist", "create the directory first", path=absent)
    answer.check("directory", "problem", "is not writable", "change its mode", path=locked)
    answer.check("directory", "problem", "is not a directory", path=tmp_path / "file")
    assert {one["path"] for one in answer.answer["findings"]} == {
        *("", str(absent), str(locked), str(tmp_path / "file"), str(tmp_path))
    }


def test_read_only_mount(doctor: Doctor, tmp_path: Path) -> None:
    point = tmp_path / "mounted"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(point)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    try:
        doctor(point).check("directory", "problem", "mounted read-only", "remount it")
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_full_file_system(doctor: Doctor, tmp_path: Path) -> None:
    point = tmp_path / "mounted"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=3", "none", str(point)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    try:
        for name in "ab":
            (point / name).write_text("")
        doctor(point).check("directory", "problem", "No space left", "free space")
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_o_direct_refused(doctor: Doctor) -> None:
    code = (
        "import os\nreal = os.open\n"
        "def refuse(path, flags, *more, **named):\n"
        "    if flags & os.O_DIRECT: raise OSError(22, 'Invalid argument')\n"
        "    return real(path, flags, *more, **named)\n"
        "os.open = refuse\n"
    )
    doctor(code=code).check("O_DIRECT", "problem", "does not work (Invalid argument)", "ext4")


def test_for_people(tmp_path: Path, plain_environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "tiermem.cli", "doctor", str(tmp_path), str(tmp_path / "absent")]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=plain_environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "does not exist" in done.stdout
    assert "→ create the directory first" in done.stdout
    *lines, last = done.stdout.rstrip().splitlines()
    assert last.endswith(("problem", "problems"))
    # The same columns about every path, and without one.
    begin = next(line for line in lines if " system " in line).index("Linux")
    about_path = [line for line in lines if line.split()[1:2] in (["locks"], ["directory"])]
    assert len(about_path) == 3
    assert all(line[begin - 1] == " " and line[begin] != " " for line in about_path)
