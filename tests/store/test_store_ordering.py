"""Transfers of one record that conflict happen in order; all others go on beside each other."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from store_bench import MakeBench

from tiermem.io import EngineStats, Fault, Op, Priority, QueueOptions
from tiermem.io.base import Move
from tiermem.memory.arena import Arena, Block
from tiermem.memory.ledger import Ledger
from tiermem.store.records import Record, RecordSpec, Residency
from tiermem.store.store import TieredStore
from tiermem.types import Field, Purpose, Tier

BLOCK = 4096


class HeldRequest:
    def __init__(self, engine: HeldEngine, length: int) -> None:
        self.engine = engine
        self.length = length
        self.event = threading.Event()

    def done(self) -> bool:
        return self.event.is_set()

    def wait(self, timeout: float | None = None) -> None:
        self.engine.waiting.set()
        assert self.event.wait(10)


class HeldEngine:
    """Moves nothing; requests complete when the test says so."""

    name = "held"

    def __init__(self) -> None:
        self.requests: list[HeldRequest] = []
        self.waiting = threading.Event()
        self.refuse_after: int | None = None

    def add_queue(self, options: QueueOptions) -> int:
        return 0

    def submit_many(
        self,
        queue: int,
        op: Op,
        moves: Sequence[Move],
        *,
        owner: object = None,
        priority: Priority = Priority.BACKGROUND,
    ) -> list[HeldRequest]:
        if self.refuse_after is not None and len(self.requests) >= self.refuse_after:
            raise RuntimeError("refused")
        requests = [HeldRequest(self, length) for _, _, _, length in moves]
        self.requests.extend(requests)
        return requests

    def copy(self, destination: int, source: int, length: int, *, owner: object = None) -> HeldRequest:
        self.requests.append(HeldRequest(self, length))
        return self.requests[-1]

    def inject(self, fault: Fault | None) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None: ...

    def release(self, count: int | None = None) -> None:
        for request in self.requests[:count]:
            request.event.set()
        del self.requests[:count]


class Held:
    def __init__(self, path: Path) -> None:
        self.engine = HeldEngine()
        ledger = Ledger({Tier.HOST: 1 << 20})
        self.arena = Arena(1 << 20, tier=Tier.HOST, ledger=ledger, pin=False)
        self.store = TieredStore(self.engine, self.arena, paths=[path], stripe_bytes=2 * BLOCK)
        self.record = self.store.add(RecordSpec("w", Field.PARAM, 8 * BLOCK, Tier.NVME))
        block = self.arena.allocate(8 * BLOCK, Purpose.OPTIMIZER)
        assert block is not None
        self.block: Block = block

    def start(self, op: Op, first: int, last: int) -> object:
        move = self.store.write if op is Op.WRITE else self.store.read
        return move(self.record, first * BLOCK, last * BLOCK, self.block.address)

    def waits(self, op: Op, first: int, last: int) -> bool:
        return self.store.would_wait(self.record, first * BLOCK, last * BLOCK, op)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    transfer = made.start(Op.WRITE, 0, 8)
    made.engine.release()
    assert transfer.done()  # type: ignore[attr-defined]
    made.engine.waiting.clear()
    yield made
    made.engine.release()
    made.store.close()
    made.arena.close(force=True)


@pytest.mark.parametrize(
    ("first", "second", "overlapping"),
    [
        (Op.WRITE, Op.READ, True),
        (Op.READ, Op.WRITE, True),
        (Op.WRITE, Op.WRITE, True),
        (Op.READ, Op.READ, False),
    ],
)
def test_only_conflicting_transfers_wait(held: Held, first: Op, second: Op, overlapping: bool) -> None:
    held.start(first, 0, 4)
    assert not held.waits(second, 4, 8)
    held.start(second, 4, 8)  # does not block
    assert held.waits(second, 3, 5) == (overlapping or Op.WRITE in (first, second))
    started = threading.Event()

    def conflicting() -> None:
        held.start(second, 0, 1)
        started.set()

    thread = threading.Thread(target=conflicting)
    thread.start()
    if overlapping:
        assert held.engine.waiting.wait(10)
        assert not started.is_set()
        assert len(held.engine.requests) == 2
        held.engine.release(1)
    thread.join(10)
    assert started.is_set()
    assert held.store.stats().conflict_waits == (1 if overlapping else 0)


def test_waiting_for_one_record_does_not_stop_another(held: Held) -> None:
    other = held.store.add(RecordSpec("v", Field.PARAM, BLOCK, Tier.NVME))
    held.start(Op.WRITE, 0, 8)
    thread = threading.Thread(target=held.start, args=(Op.READ, 0, 8))
    thread.start()
    assert held.engine.waiting.wait(10)
    held.store.write(other, 0, BLOCK, held.block.address)
    held.store.reap()
    assert held.store.stats().in_flight == 2
    held.engine.release()
    thread.join(10)


def test_residency_follows_what_is_in_flight(held: Held) -> None:
    record: Record = held.record
    assert record.residency is Residency.NVME
    held.start(Op.READ, 0, 2)
    assert record.residency is Residency.READING
    held.start(Op.WRITE, 2, 4)
    assert record.residency is Residency.WRITING
    held.start(Op.READ, 4, 6)
    assert record.residency is Residency.WRITING
    held.engine.release(2)
    held.store.reap()
    assert record.residency is Residency.READING
    held.engine.release()
    held.store.reap()
    assert record.residency is Residency.NVME


def test_the_owner_is_held_until_completion_and_not_longer(held: Held) -> None:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    held.store.read(held.record, 0, BLOCK, held.block.address, owner)
    del owner
    gc.collect()
    held.store.reap()
    assert alive() is not None
    held.engine.release()
    held.store.reap()
    gc.collect()
    assert alive() is None


def test_an_owner_may_use_the_store_when_it_dies(held: Held) -> None:
    class Owner:
        def __del__(self) -> None:
            seen.append(held.store.stats().in_flight)

    seen: list[int] = []
    held.store.read(held.record, 0, BLOCK, held.block.address, Owner())
    held.engine.release()
    held.store.reap()
    gc.collect()
    assert seen == [0]


def test_a_write_that_is_refused_half_way_poisons(held: Held, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    store = TieredStore(
        held.engine, held.arena, paths=[tmp_path, tmp_path / "second"], stripe_bytes=BLOCK
    )
    record = store.add(RecordSpec("w", Field.PARAM, 4 * BLOCK, Tier.NVME))
    held.engine.refuse_after = 2
    releaser = threading.Timer(0.2, held.engine.release)
    releaser.start()
    with pytest.raises(RuntimeError, match="refused"):
        store.write(record, 0, 4 * BLOCK, held.block.address)
    releaser.join()
    assert record.failed is not None
    assert "not all was submitted" in str(record.failed)
    held.engine.refuse_after = None
    write = store.write(record, 0, 4 * BLOCK, held.block.address)
    held.engine.release()
    write.wait()
    assert record.failed is None
    store.close()


def test_two_threads_see_whole_writes_in_order(make_bench: MakeBench) -> None:
    """Each thread writes its own mark over a range and reads it back in the same range."""
    bench = make_bench(2, stripe_bytes=BLOCK)
    nbytes = 16 * BLOCK
    record = bench.store.add(RecordSpec("w", Field.PARAM, nbytes, Tier.NVME, 0.3))
    bench.put(record, bytes(nbytes))
    torn: list[str] = []

    def work(mark: int) -> None:
        choose = random.Random(mark)
        source, target = bench.buffer(nbytes), bench.buffer(nbytes)
        for _ in range(60):
            source.view()[:] = bytes([mark]) * nbytes
            bench.store.write(record, 0, nbytes, source.address, source)
            start = choose.randrange(0, nbytes, BLOCK)
            bench.store.read(record, start, nbytes, target.address, target).wait()
            got = ctypes.string_at(target.address, nbytes - start)
            if len(set(got)) != 1 or got[0] == 0:
                torn.append(f"{mark}: {sorted(set(got))}")
            bench.store.reap()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    bench.store.drain()
    assert bench.store.stats().in_flight == 0
