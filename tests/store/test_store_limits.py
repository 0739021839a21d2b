"""What a system can refuse a store: it serves all the same, or says so and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from store_bench import MakeBench

from tiermem.errors import TierIOError
from tiermem.io import Fault, FaultKind, Op, QueueOptions, files, open_engine
from tiermem.memory.arena import Arena
from tiermem.memory.ledger import Ledger
from tiermem.store.records import RecordSpec
from tiermem.store.store import TieredStore
from tiermem.types import Field, Tier

BLOCK = 4096
NUM = 6
NBYTES = NUM * 4 * BLOCK - 100
HANDLED = {
    "short": (FaultKind.SHORT, 0, 1),
    "EINTR": (FaultKind.SUBMIT_ERROR, errno.EINTR, 2),
    "EAGAIN": (FaultKind.SUBMIT_ERROR, errno.EAGAIN, 2),
    "partial": (FaultKind.PARTIAL_SUBMIT, 0, 1),
}


@pytest.mark.parametrize("kind", HANDLED)
def test_handled_at_every_chunk(make_bench: MakeBench, kind: str) -> None:
    bench = make_bench(2, stripe_bytes=4 * BLOCK, queue_options=QueueOptions(4 * BLOCK))
    record = bench.store.add(RecordSpec("w", Field.PARAM, NBYTES, Tier.NVME))
    fault, code, repeat = HANDLED[kind]
    for nth in range(NUM):
        data = os.urandom(NBYTES)
        bench.engine.inject(Fault(Op.WRITE, nth, fault, code, repeat))
        bench.put(record, data)
        bench.engine.inject(Fault(Op.READ, nth, fault, code, repeat))
        assert bench.get(record) == data


def refuse_flag(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return _open(path, flags, mode, dir_fd=dir_fd)


_open = os.open


def refuse_read(*_: object) -> int:
    raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize(("name", "refusal"), [("open", refuse_flag), ("preadv", refuse_read)])
def test_o_direct_is_refused(
    make_bench: MakeBench, name: str, refusal: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files.os, name, refusal)
        bench = make_bench(2, stripe_bytes=BLOCK)
    assert not bench.store.direct
    assert "buffered" in bench.store.describe()
    record = bench.store.add(RecordSpec("w", Field.PARAM, NBYTES, Tier.NVME))
    data = os.urandom(NBYTES)
    bench.put(record, data)
    assert bench.get(record) == data


def test_a_queue_is_refused(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where descriptors or aio-max-nr run out: the paths are clean afterwards."""
    try:
        engine = open_engine(backend)
    except ValueError as error:
        pytest.skip(str(error))
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    real, added = engine.add_queue, []

    def only_one(options: QueueOptions) -> int:
        if added:
            raise OSError(errno.EAGAIN, "fs.aio-max-nr is used up")
        added.append(real(options))
        return added[0]

    monkeypatch.setattr(engine, "add_queue", only_one)
    arena = Arena(1 << 20, tier=Tier.HOST, ledger=Ledger({Tier.HOST: 1 << 20}), pin=False)
    with pytest.raises(OSError, match="aio-max-nr"):
        TieredStore(engine, arena, paths=paths)
    assert [list(path.iterdir()) for path in paths] == [[], []]
    engine.close()
    arena.close()


def test_a_path_that_vanishes(make_bench: MakeBench, tmp_path: Path) -> None:
    """What is open lives on; what would have to be made there says where; closing is quiet."""
    bench = make_bench(1)
    record = bench.store.add(RecordSpec("w", Field.PARAM, NBYTES, Tier.NVME))
    data = os.urandom(NBYTES)
    bench.put(record, data)
    shutil.rmtree(tmp_path / "drive0")
    assert bench.get(record) == data
    bench.put(record, data[::-1])
    assert bench.get(record) == data[::-1]
    other = bench.store.add(RecordSpec("v", Field.PARAM, NBYTES, Tier.NVME))
    bench.put(other, data)
    assert bench.get(other) == data
    with pytest.raises(TierIOError, match=r"No such file or directory.*drive0|drive0.*No such file"):
        bench.store.add(RecordSpec("u", Field.PARAM, NBYTES, Tier.NVME), generation=1)
    bench.store.close()


def test_close_with_transfers_in_flight(make_bench: MakeBench) -> None:
    """It waits for them; their buffers are then theirs no more."""
    bench = make_bench(2, stripe_bytes=BLOCK)
    record = bench.store.add(RecordSpec("w", Field.PARAM, 1 << 20, Tier.NVME))
    data = os.urandom(1 << 20)
    bench.put(record, data)
    bench.engine.inject(Fault(Op.READ, 1, FaultKind.SUBMIT_ERROR, errno.EAGAIN, repeat=12))
    target = bench.buffer(1 << 20)
    transfer = bench.store.read(record, 0, 1 << 20, target.address, target)
    bench.store.close()
    assert transfer.settled
    assert bytes(target.view()) == data
