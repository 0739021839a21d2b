"""No failed transfer is lost, and nothing undefined is ever read."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from store_bench import Bench, MakeBench

from tiermem.errors import ConfigError, StateError, TierIOError
from tiermem.io import Fault, FaultKind, Op, QueueOptions
from tiermem.store.records import Record, RecordSpec
from tiermem.types import Field, Tier

BLOCK = 4096
NBYTES = 6 * BLOCK - 100


def prepared(make_bench: MakeBench) -> tuple[Bench, Record]:
    bench: Bench = make_bench(
        2, stripe_bytes=BLOCK, queue_options=QueueOptions(BLOCK, read_depth=2, write_depth=2)
    )
    record = bench.store.add(RecordSpec("block.1.weight", Field.EXP_AVG, NBYTES, Tier.NVME))
    bench.put(record, b"0" * NBYTES)
    return bench, record


@pytest.mark.parametrize("nth", range(6))
def test_failed_read_raises_where_it_is_waited_for(make_bench: MakeBench, nth: int) -> None:
    bench, record = prepared(make_bench)
    buffer = bench.buffer(NBYTES)
    bench.engine.inject(Fault(Op.READ, nth, FaultKind.ERROR, errno.EIO))
    transfer = bench.store.read(record, 0, NBYTES, buffer.address, buffer)
    for _ in range(2):
        with pytest.raises(
            TierIOError, match=r"read of 4096 bytes at offset \d+ of .*gen0.bin"
        ) as caught:
            transfer.wait()
        assert caught.value.errno == errno.EIO
        assert caught.value.context.record == "block.1.weight/exp_avg"
        assert Path(caught.value.context.path).name == "gen0.bin"
    bench.store.reap()
    assert record.failed is None
    assert bench.get(record) == b"0" * NBYTES


@pytest.mark.parametrize("nth", range(6))
def test_failed_write_raises_and_poisons_until_rewritten(make_bench: MakeBench, nth: int) -> None:
    bench, record = prepared(make_bench)
    buffer = bench.buffer(b"1" * NBYTES)
    bench.engine.inject(Fault(Op.WRITE, nth, FaultKind.ERROR, errno.ENOSPC))
    transfer = bench.store.write(record, 0, NBYTES, buffer.address, buffer)
    with pytest.raises(TierIOError, match="write of 4096 bytes") as caught:
        transfer.wait()
    assert caught.value.errno == errno.ENOSPC
    bench.store.reap()  # it has been raised already
    with pytest.raises(StateError, match=r"undefined since a write.*No space.*write all"):
        bench.get(record)
    bench.put(record, b"2" * BLOCK)
    with pytest.raises(StateError, match="undefined"):
        bench.get(record, 0, BLOCK)  # only part of it was rewritten
    bench.put(record, b"3" * (NBYTES - BLOCK), BLOCK)
    assert bench.get(record) == b"2" * BLOCK + b"3" * (NBYTES - BLOCK)


@pytest.mark.parametrize("way", ["reap", "drain", "close"])
def test_failed_write_nobody_waits_for_is_raised_once(make_bench: MakeBench, way: str) -> None:
    bench, record = prepared(make_bench)
    buffer = bench.buffer(b"1" * NBYTES)
    bench.engine.inject(Fault(Op.WRITE, 3, FaultKind.ERROR, errno.EIO))
    bench.store.write(record, 0, NBYTES, buffer.address, buffer)
    while way == "reap" and bench.store.would_wait(record, 0, NBYTES, Op.WRITE):
        pass
    with pytest.raises(TierIOError, match=r"block.1.weight/exp_avg.*Input/output"):
        getattr(bench.store, way)()
    bench.store.drain()
    bench.store.close()


def test_a_read_behind_a_failed_write_does_not_hide_it(make_bench: MakeBench) -> None:
    bench, record = prepared(make_bench)
    buffer = bench.buffer(b"1" * NBYTES)
    bench.engine.inject(Fault(Op.WRITE, 0, FaultKind.ERROR, errno.EIO))
    bench.store.write(record, 0, NBYTES, buffer.address, buffer)
    with pytest.raises(StateError, match="undefined"):
        bench.store.read(record, 0, BLOCK, buffer.address, buffer)
    with pytest.raises(TierIOError):
        bench.store.reap()


def test_close_raises_one_failure_and_logs_the_others(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    bench, record = prepared(make_bench)
    other = bench.store.add(RecordSpec("other", Field.PARAM, BLOCK, Tier.NVME))
    buffer = bench.buffer(b"1" * NBYTES)
    bench.engine.inject(Fault(Op.WRITE, 0, FaultKind.ERROR, errno.EIO, repeat=100))
    bench.store.write(record, 0, NBYTES, buffer.address, buffer)
    bench.store.write(other, 0, BLOCK, buffer.address, buffer)
    with caplog.at_level(logging.ERROR), pytest.raises(TierIOError, match="block"):
        bench.store.close()
    assert "other/param" in caplog.text
    assert list(tmp_path.glob("drive*/*")) == []


def test_short_transfers_are_continued(make_bench: MakeBench) -> None:
    bench: Bench = make_bench(1)
    record = bench.store.add(RecordSpec("w", Field.PARAM, NBYTES, Tier.NVME))
    data = os.urandom(NBYTES)
    bench.engine.inject(Fault(Op.WRITE, 0, FaultKind.SHORT))
    bench.put(record, data)
    bench.engine.inject(Fault(Op.READ, 0, FaultKind.SHORT))
    assert bench.get(record) == data


def test_full_disk_is_found_at_add(
    make_bench: MakeBench, mount: Callable[..., Path], tmp_path: Path
) -> None:
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    small = mount(1 << 20)
    bench: Bench = make_bench(paths=[roomy, small], stripe_bytes=BLOCK)
    kept = bench.store.add(RecordSpec("kept", Field.PARAM, 100_000, Tier.NVME, 0.2))
    bench.put(kept, b"k" * 100_000)
    before = bench.store.stats()
    with pytest.raises(
        TierIOError, match=r"preallocation.*bytes \(.*\) are needed.*are free"
    ) as caught:
        bench.store.add(RecordSpec("big", Field.PARAM, 4 << 20, Tier.NVME, 0.2))
    assert caught.value.errno == errno.ENOSPC
    assert str(small) in str(caught.value)
    assert bench.store.stats() == before  # nothing of it stays, neither in memory nor on the roomy path
    sizes = [os.stat(Path(path.path) / "gen0.bin").st_size for path in before.paths]
    assert sizes == [path.allocated_bytes for path in before.paths]
    assert bench.get(kept) == b"k" * 100_000
    again = bench.store.add(RecordSpec("small", Field.PARAM, 100_000, Tier.NVME))
    bench.put(again, b"a" * 100_000)
    assert bench.get(again) == b"a" * 100_000


def test_a_path_full_from_the_start(make_bench: MakeBench, mount: Callable[..., Path]) -> None:
    point = mount(64 * 1024, "nr_inodes=2")
    (point / "last").write_bytes(b"x")
    with pytest.raises(TierIOError, match="No space left"):
        make_bench(paths=[point])


def test_a_path_that_cannot_be_used_leaves_nothing_on_the_others(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    good.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"missing.*does not exist.*null.*not a directory"):
        make_bench(paths=[good, tmp_path / "missing", Path("/dev/null")])
    assert list(good.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


RUN = """
    import sys, time
    from pathlib import Path
    from tiermem.io import open_engine
    from tiermem.memory.arena import Arena
    from tiermem.memory.ledger import Ledger
    from tiermem.store.records import RecordSpec
    from tiermem.store.store import TieredStore
    from tiermem.types import Field, Purpose, Tier

    arena = Arena(1 << 22, tier=Tier.HOST, ledger=Ledger({Tier.HOST: 1 << 22}), pin=False)
    store = TieredStore(open_engine("threads"), arena, paths=[Path(sys.argv[1])])
    record = store.add(RecordSpec("w", Field.PARAM, 1 << 20, Tier.NVME))
    block = arena.allocate(1 << 20, Purpose.OPTIMIZER)
    print("ready", flush=True)
    while True:
        store.write(record, 0, 1 << 20, block.address, block)
        store.reap()
"""


def test_killed_while_writing_is_reclaimed_by_the_next_start(
    make_bench: MakeBench, tmp_path: Path, python_env: dict[str, str]
) -> None:
    drive = tmp_path / "drive0"
    drive.mkdir()
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(drive)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_env)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (dead,) = drive.iterdir()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert dead.exists()
    bench: Bench = make_bench(1)
    assert not dead.exists()
    assert len(list(drive.iterdir())) == 1
    bench.store.close()


def test_a_forked_child_closes_without_waiting_or_deleting(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    bench, record = prepared(make_bench)
    child = os.fork()
    if child == 0:
        bench.store.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bench.get(record) == b"0" * NBYTES
    assert len(list(tmp_path.glob("drive*/*/gen0.bin"))) == 2


def test_room_is_checked_for_all_that_is_to_come(
    make_bench: MakeBench, mount: Callable[..., Path]
) -> None:
    """Shares of one filesystem add up; nothing is allocated by looking."""
    point = mount(8 << 20)
    paths = [point / name for name in "ab"]
    for path in paths:
        path.mkdir()
    store = make_bench(paths=paths).store
    store.check_room(7 << 20)
    with pytest.raises(TierIOError, match=r"9437184 bytes .* in all.*add a path") as caught:
        store.check_room(9 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert all(path.allocated_bytes == 0 for path in store.stats().paths)


def test_a_limit_on_file_sizes_is_named(tmp_path: Path, python_env: dict[str, str]) -> None:
    script = (
        "import resource, sys, torch, tiermem\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "config = {'params': 'nvme', 'optimizer': 'nvme', 'paths': sys.argv[1:]}\n"
        "config |= {'host_memory': '16MiB', 'resident_memory': 0, 'persistence_threshold_numel': 0}\n"
        "with tiermem.Runtime(config) as runtime:\n"
        "    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])\n"
        "    try:\n"
        "        tiermem.shard(model, runtime)\n"
        "    except tiermem.errors.TierIOError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=python_env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "1048576 bytes. Raise it (ulimit -f)" in done.stdout, done.stderr
