"""Many small records at once: the same bytes as one by one, and each has its own failure."""

from __future__ import annotations

import errno
import random

import pytest
from store_bench import Bench, MakeBench

from tiermem.errors import StateError, TierIOError
from tiermem.io import Fault, FaultKind, Op, QueueOptions
from tiermem.memory.arena import Block
from tiermem.store.records import Record, RecordSpan, RecordSpec
from tiermem.store.transfer import Transfer
from tiermem.types import Field, Tier, round_up

BLOCK = 4096
NUM = 10


def small_records(bench: Bench, sizes: list[int], host_fraction: float = 0.0) -> list[Record]:
    return [
        bench.store.add(RecordSpec(f"r{at}", Field.PARAM, size, Tier.NVME, host_fraction))
        for at, size in enumerate(sizes)
    ]


def side_by_side(bench: Bench, records: list[Record]) -> tuple[Block, list[RecordSpan]]:
    """All records in one buffer, in their order."""
    buffer = bench.buffer(sum(round_up(record.nbytes) for record in records))
    spans, at = [], buffer.address
    for record in records:
        spans.append(RecordSpan(record, 0, record.nbytes, at))
        at += round_up(record.nbytes)
    return buffer, spans


def contents(buffer: Block, spans: list[RecordSpan]) -> list[bytes]:
    view = bytes(buffer.view())
    places = [(span.address - buffer.address, span.stop) for span in spans]
    return [view[at : at + nbytes] for at, nbytes in places]


def filled(bench: Bench, records: list[Record]) -> tuple[Block, list[RecordSpan], list[bytes]]:
    """Random contents, written at once."""
    buffer, spans = side_by_side(bench, records)
    buffer.view()[:] = random.Random(1).randbytes(len(buffer.view()))
    for transfer in bench.store.write_many(spans, buffer):
        transfer.wait()
    return buffer, spans, contents(buffer, spans)


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """One path at depth 1, so that transfers start in order, one by one."""
    made: Bench = make_bench(1, queue_options=QueueOptions(1 << 20, read_depth=1, write_depth=1))
    return made


@pytest.mark.parametrize(
    ("num_paths", "host_fraction"), [(1, 0.0), (3, 0.0), (2, 0.4), (1, 1.0)], ids=str
)
def test_same_bytes_in_any_order(make_bench: MakeBench, num_paths: int, host_fraction: float) -> None:
    bench = make_bench(num_paths, stripe_bytes=4 * BLOCK, queue_options=QueueOptions(8 * BLOCK))
    choose = random.Random(num_paths)
    sizes = [choose.choice([100, BLOCK, 3 * BLOCK - 5, 9 * BLOCK]) for _ in range(60)]
    records = small_records(bench, sizes, host_fraction)
    buffer, spans, expected = filled(bench, records)
    for order in ("as they lie", "shuffled"):
        if order == "shuffled":
            choose.shuffle(spans)
        buffer.view()[:] = bytes(len(buffer.view()))
        for transfer in bench.store.read_many(spans, buffer):
            transfer.wait()
        by_record = dict(zip(map(id, records), expected, strict=True))
        assert contents(buffer, spans) == [by_record[id(span.record)] for span in spans]
    assert [bench.get(record) for record in records] == expected


def test_neighbours_are_one_request_up_to_a_chunk(make_bench: MakeBench) -> None:
    bench = make_bench(1, queue_options=QueueOptions(4 * BLOCK))
    buffer, spans, _ = filled(bench, small_records(bench, [BLOCK] * NUM))
    before = bench.engine.stats()
    for transfer in bench.store.read_many(spans, buffer):
        transfer.wait()
    after = bench.engine.stats()
    assert after.read_chunks - before.read_chunks == 3  # 4 + 4 + 2 records
    assert after.read_bytes - before.read_bytes == NUM * BLOCK
    assert bench.store.stats().paths[0].read_bytes == NUM * BLOCK


def test_gaps_in_memory_or_storage_are_not_joined(bench: Bench) -> None:
    records = small_records(bench, [BLOCK] * 4)
    buffer, spans, expected = filled(bench, records)
    before = bench.engine.stats().read_chunks
    for some in ([spans[0], spans[2]], [spans[1], spans[0]]):
        for transfer in bench.store.read_many(some, buffer):
            transfer.wait()
    assert bench.engine.stats().read_chunks == before + 4
    assert contents(buffer, spans) == expected


def started_with_failures(bench: Bench, op: Op, spans: list[RecordSpan], nth: int) -> list[Transfer]:
    """The joint request has failed, and so will its part ``nth`` when it is moved again by itself."""

    def chunks() -> int:
        stats = bench.engine.stats()
        return stats.read_chunks + stats.written_chunks

    before = chunks()
    bench.engine.inject(Fault(op, 0, FaultKind.ERROR, errno.EIO))
    start = bench.store.read_many if op is Op.READ else bench.store.write_many
    transfers = start(spans)
    while chunks() == before:  # nobody looks at the result yet, so nothing is moved again yet
        pass
    bench.engine.inject(Fault(op, nth, FaultKind.ERROR, errno.EIO))
    return transfers


@pytest.mark.parametrize("nth", range(NUM))
def test_a_failed_read_is_told_to_its_record_only(bench: Bench, nth: int) -> None:
    buffer, spans, expected = filled(bench, small_records(bench, [BLOCK] * NUM))
    buffer.view()[:] = bytes(NUM * BLOCK)
    transfers = started_with_failures(bench, Op.READ, spans, nth)
    for at, transfer in enumerate(transfers):
        if at == nth:
            with pytest.raises(TierIOError, match=f"of 4096 bytes at offset {at * BLOCK} of") as caught:
                transfer.wait()
            assert caught.value.context.record == f"r{at}/param"
        else:
            transfer.wait()
    got = contents(buffer, spans)
    assert got[:nth] + got[nth + 1 :] == expected[:nth] + expected[nth + 1 :]


@pytest.mark.parametrize("nth", range(NUM))
def test_a_failed_write_poisons_its_record_only(bench: Bench, nth: int) -> None:
    buffer, spans, _ = filled(bench, small_records(bench, [BLOCK] * NUM))
    buffer.view()[:] = b"n" * (NUM * BLOCK)
    started_with_failures(bench, Op.WRITE, spans, nth)
    with pytest.raises(TierIOError, match=f"r{nth}/param"):
        bench.store.drain()
    for at, span in enumerate(spans):
        if at == nth:
            with pytest.raises(StateError, match="undefined since a write"):
                bench.get(span.record)
        else:
            assert bench.get(span.record) == b"n" * BLOCK


def test_a_passing_failure_of_a_joint_request_is_repaired(bench: Bench) -> None:
    buffer, spans, expected = filled(bench, small_records(bench, [BLOCK] * NUM))
    buffer.view()[:] = bytes(NUM * BLOCK)
    bench.engine.inject(Fault(Op.READ, 0, FaultKind.ERROR, errno.EIO))
    for transfer in reversed(bench.store.read_many(spans, buffer)):
        while not transfer.done():
            pass
        transfer.wait()
    assert contents(buffer, spans) == expected


def test_spans_that_overlap_are_refused(bench: Bench) -> None:
    record, other = small_records(bench, [4 * BLOCK, BLOCK])
    buffer = bench.buffer(8 * BLOCK)
    spans = [
        RecordSpan(other, 0, BLOCK, buffer.address),
        RecordSpan(record, 0, 2 * BLOCK, buffer.address + BLOCK),
        RecordSpan(record, BLOCK, 3 * BLOCK, buffer.address + 3 * BLOCK),
    ]
    with pytest.raises(ValueError, match=r"overlapping parts of record r0/param: \[0, 8192\) and"):
        bench.store.write_many(spans)
    assert bench.store.stats().in_flight == 0
    assert not record.in_flight
    bench.put(record, b"x" * 4 * BLOCK)
    for transfer in bench.store.read_many(spans[1:]):  # reads may
        transfer.wait()


def test_it_waits_for_what_conflicts_with_any(bench: Bench) -> None:
    """A batch behind writes in flight reads what they wrote."""
    buffer, spans, _ = filled(bench, small_records(bench, [BLOCK] * NUM))
    target, reads = side_by_side(bench, [span.record for span in spans])
    for mark in range(1, 20):
        buffer.view()[:] = bytes([mark]) * (NUM * BLOCK)
        bench.store.write_many(spans, buffer)
        for transfer in bench.store.read_many(reads, target):
            transfer.wait()
        assert bytes(target.view()) == bytes([mark]) * (NUM * BLOCK)


def test_one_that_cannot_be_read_starts_none(bench: Bench) -> None:
    records = small_records(bench, [BLOCK] * 3)
    buffer, spans = side_by_side(bench, records)
    for record in records[:2]:
        bench.put(record, b"1" * BLOCK)
    before = bench.engine.stats().read_chunks
    with pytest.raises(StateError, match=r"r2/param.*never written"):
        bench.store.read_many(spans, buffer)
    assert bench.engine.stats().read_chunks == before
    assert [record.in_flight for record in records] == [[], [], []]
    assert bench.get(records[0]) == b"1" * BLOCK


def test_first_writes_can_be_read_at_once(bench: Bench) -> None:
    buffer, spans = side_by_side(bench, small_records(bench, [BLOCK] * NUM))
    buffer.view()[:] = b"w" * (NUM * BLOCK)
    bench.store.write_many(spans, buffer)
    for span in spans:
        assert bench.get(span.record) == b"w" * BLOCK
