"""A run's directory is its own, goes with it however it ends, and nothing else is ever deleted."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tiermem.errors import ConfigError, TierIOError
from tiermem.store.mounts import Mount, find_mount
from tiermem.store.rundir import RunDirectory, check_paths, dead_bytes, is_live

HOLD = """
    import sys, time
    from pathlib import Path
    from tiermem.store.rundir import RunDirectory

    run = RunDirectory(Path(sys.argv[1]))
    (run.path / "gen0.bin").write_bytes(bytes(8192))
    print(run.name, flush=True)
    time.sleep(600)
"""


def start_holder(path: Path, env: dict[str, str]) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdout is not None
    return process, path / process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def dead_run(path: Path, name: str = "tiermem-run-gone-1-0123abcd") -> Path:
    """What a killed run leaves."""
    directory = path / name
    directory.mkdir()
    marker = {"kind": "tiermem run directory", "directory": name, "pid": 1, "host": "gone"}
    (directory / "run.lock").write_text(json.dumps(marker))
    (directory / "gen0.bin").write_bytes(b"x" * 5000)
    return directory


def test_made_locked_and_removed_with_what_is_in_it(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        assert run.path.parent == tmp_path
        assert is_live(run.path)
        (run.path / "gen0.bin").write_bytes(b"data")
        (run.path / "gen12.bin").write_bytes(b"data")
    assert list(tmp_path.iterdir()) == []
    run.close()
    assert not is_live(run.path)


def test_killed_run_is_reclaimed_by_the_next_and_a_live_one_is_not(
    tmp_path: Path, python_env: dict[str, str]
) -> None:
    killed, dead = start_holder(tmp_path, python_env)
    living, live = start_holder(tmp_path, python_env)
    try:
        end(killed)
        assert dead.exists()
        assert not is_live(dead)
        assert is_live(live)
        with RunDirectory(tmp_path) as run:
            assert run.reclaimed == (dead.name,)
            assert not dead.exists()
            assert (live / "gen0.bin").stat().st_size == 8192
    finally:
        end(living)
    with RunDirectory(tmp_path) as run:
        assert run.reclaimed == (live.name,)


def test_two_runs_of_one_process_do_not_meet(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as first, RunDirectory(tmp_path) as second:
        assert first.path != second.path
        assert second.reclaimed == ()
        assert is_live(first.path)
        assert is_live(second.path)


def test_starters_at_once_never_reclaim_each_other(tmp_path: Path) -> None:
    problems: list[object] = []

    def cycle() -> None:
        try:
            for _ in range(30):
                with RunDirectory(tmp_path) as run:
                    (run.path / "gen0.bin").write_bytes(b"mine")
                    if run.reclaimed or (run.path / "gen0.bin").read_bytes() != b"mine":
                        problems.append(run.reclaimed)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=cycle) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_ours_stays(tmp_path: Path) -> None:
    base = "tiermem-run-gone-"
    unmarked = tmp_path / f"{base}2-00000000"
    unmarked.mkdir()
    (unmarked / "gen0.bin").write_bytes(b"x")
    copied = dead_run(tmp_path, f"{base}3-00000000")
    (tmp_path / f"{base}4-00000000").mkdir()
    (tmp_path / f"{base}4-00000000" / "run.lock").write_bytes((copied / "run.lock").read_bytes())
    garbage = dead_run(tmp_path, f"{base}5-00000000")
    (garbage / "run.lock").write_bytes(b"\xff\x00 not json")
    listed = dead_run(tmp_path, f"{base}6-00000000")
    (listed / "run.lock").write_text("[]")
    other = dead_run(tmp_path, "my-data")
    fifo = tmp_path / f"{base}7-00000000"
    fifo.mkdir()
    os.mkfifo(fifo / "run.lock")
    (tmp_path / f"{base}8-00000000").write_text("a file")
    with RunDirectory(tmp_path) as run:
        assert run.reclaimed == (copied.name,)
    for path in (unmarked, garbage, listed, other):
        assert (path / "gen0.bin").exists()
    assert fifo.exists()
    assert (tmp_path / f"{base}4-00000000").exists()
    assert (tmp_path / f"{base}8-00000000").exists()


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    drive, victim = tmp_path / "drive", tmp_path / "victim"
    drive.mkdir()
    victim.mkdir()
    precious = dead_run(victim)  # a perfect run directory, but elsewhere
    (drive / precious.name).symlink_to(precious)
    inner = dead_run(drive, "tiermem-run-gone-2-00000000")
    (inner / "gen0.bin").unlink()
    (inner / "gen0.bin").symlink_to(precious / "gen0.bin")
    marked = dead_run(drive, "tiermem-run-gone-3-00000000")
    marker = victim / "marker"
    (marked / "run.lock").rename(marker)
    (marked / "run.lock").symlink_to(marker)
    with RunDirectory(drive) as run:
        assert run.reclaimed == ()
    assert (precious / "gen0.bin").read_bytes() == b"x" * 5000
    assert (inner / "gen0.bin").is_symlink()
    assert marked.exists()
    assert marker.exists()


def test_foreign_files_in_a_dead_run_stay_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = dead_run(tmp_path)
    (dead / "notes.txt").write_text("mine")
    (dead / "sub").mkdir()
    with RunDirectory(tmp_path) as run:
        assert run.reclaimed == ()
    assert "notes.txt" in caplog.text
    assert not (dead / "gen0.bin").exists()
    (dead / "notes.txt").unlink()
    (dead / "sub").rmdir()
    with RunDirectory(tmp_path) as run:
        assert run.reclaimed == (dead.name,)


def test_close_leaves_foreign_files_and_survives_removal_by_hand(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (run.path / "notes.txt").write_text("mine")
    run.close()
    assert (run.path / "notes.txt").exists()
    run = RunDirectory(tmp_path)
    (run.path / "run.lock").unlink()
    run.path.rmdir()
    run.close()


def test_a_forked_child_deletes_nothing_and_does_not_unlock(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    child = os.fork()
    if child == 0:
        run.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_live(run.path)
    with RunDirectory(tmp_path) as other:
        assert other.reclaimed == ()
    run.close()


def test_executed_programs_do_not_inherit_the_lock(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    program = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        path = run.path
        run._parent_fd, parent = None, run._parent_fd  # as if the process had died
        for descriptor in (run._lock_fd, run._fd, parent):
            assert descriptor is not None
            os.close(descriptor)
        assert not is_live(path)
    finally:
        program.kill()
        program.wait()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    dead_run(tmp_path)
    RunDirectory(tmp_path).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        RunDirectory(tmp_path).close()
        is_live(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_paths_that_cannot_be_used_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    paths = [
        tmp_path / "missing",
        tmp_path / "file",
        Path("/dev/null"),
        tmp_path / "dangling",
        tmp_path,
    ]
    with pytest.raises(ConfigError) as caught:
        check_paths(paths)
    message = str(caught.value)
    assert f"{str(tmp_path / 'missing')!r} does not exist; create" in message
    assert f"{str(tmp_path / 'file')!r} is not a directory" in message
    assert "'/dev/null' is not a directory" in message
    assert f"{str(tmp_path / 'dangling')!r} is not a directory" in message
    assert message.count("path ") == 4
    with pytest.raises(ConfigError, match="does not exist"):
        RunDirectory(tmp_path / "missing")


def test_read_only_filesystem(mount: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="read-only"):
        RunDirectory(mount(1 << 20, "ro"))


def test_path_without_permission(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        RunDirectory(tmp_path)


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.ENOENT, ConfigError, "cannot hold a run's files.*No such file"),  # as in /proc
        (errno.EPERM, ConfigError, "cannot hold a run's files.*not permitted"),
        (errno.ENOSPC, TierIOError, "making a run directory at .*No space left.*free space"),
    ],
)
def test_a_directory_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], message: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(kind, match=message) as caught:
        RunDirectory(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "0 bytes" not in str(caught.value)


def test_what_dead_runs_hold_is_counted(tmp_path: Path) -> None:
    assert dead_bytes(tmp_path) == 0
    dead = dead_run(tmp_path)
    (dead / "gen7.bin").write_bytes(bytes(1 << 20))
    (dead / "notes.txt").write_bytes(bytes(1 << 20))
    assert 1 << 20 <= dead_bytes(tmp_path) < 2 << 20
    with RunDirectory(tmp_path) as live:
        (live.path / "gen7.bin").write_bytes(bytes(1 << 20))
        assert dead_bytes(tmp_path) == 0  # its neighbour was reclaimed


def test_memory_filesystem_is_said(
    mount: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), RunDirectory(mount(1 << 20)):
        pass
    assert "tmpfs, which is memory" in caplog.text
    assert len(caplog.records) == 1


def test_on_a_drive_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if find_mount(tmp_path).in_memory:
        pytest.skip("the temporary directory is in memory")
    with caplog.at_level(logging.WARNING), RunDirectory(tmp_path):
        pass
    assert not caplog.records


def test_mountinfo_is_understood(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    odd = tmp_path / "odd name"
    odd.mkdir()
    info = tmp_path / "mountinfo"
    info.write_text(
        f"20 1 {number} / / rw - ext4 /dev/root rw\n"
        f"21 20 0:99 / {tmp_path}/odd\\040name rw,relatime shared:1 - nfs4 server:/x rw\n"
        "22 20 0:98 / /elsewhere rw - tmpfs none rw\nbroken\n"
    )
    assert find_mount(tmp_path, info) == Mount("/", "ext4", "/dev/root")
    info.write_text(info.read_text().replace("0:99", number))
    mount = find_mount(odd, info)
    assert mount == Mount(str(odd), "nfs4", "server:/x")
    assert mount.is_network
    assert not mount.in_memory
    assert Mount("/x", "fuse.sshfs").is_network
    assert find_mount(tmp_path, tmp_path / "none").filesystem == "unknown"


def test_dead_runs_of_other_machines_stay_on_shared_filesystems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = dead_run(tmp_path)
    monkeypatch.setattr("tiermem.store.rundir.find_mount", lambda path: Mount("/", "lustre"))
    with RunDirectory(tmp_path) as run:
        assert run.reclaimed == ()
    monkeypatch.setattr("socket.gethostname", lambda: "gone")
    with RunDirectory(tmp_path) as run:
        assert run.reclaimed == (dead.name,)
