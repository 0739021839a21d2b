"""What was written is read, wherever it lies and however it was cut."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_bench import Bench, MakeBench

from tiermem.errors import BudgetError, ConfigError, StateError
from tiermem.store.records import RecordSpec, Residency
from tiermem.types import Field, Tier, round_up

BLOCK = 4096


@pytest.mark.parametrize("stripe", [BLOCK, 3 * BLOCK, 1 << 20])
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.5]])
@pytest.mark.parametrize(
    ("tier", "fraction"), [(Tier.HOST, 0), (Tier.NVME, 0), (Tier.NVME, 0.4), (Tier.NVME, 1)]
)
def test_whole_records_of_odd_sizes(
    make_bench: MakeBench, stripe: int, weights: list[float] | None, tier: Tier, fraction: float
) -> None:
    bench = make_bench(3, stripe_bytes=stripe, weights=weights)
    records = []
    for nbytes in (1, 511, BLOCK, BLOCK + 1, 123_457, 2_000_003):
        record = bench.store.add(RecordSpec(f"w{nbytes}", Field.PARAM, nbytes, tier, fraction))
        data = os.urandom(nbytes)
        bench.put(record, data)
        records.append((record, data))
    for record, data in records:
        assert bench.get(record) == data
        assert record.residency is (Residency.HOST if record.host_only else Residency.NVME)


@given(
    nbytes=st.integers(1, 60 * BLOCK),
    stripe=st.integers(1, 5).map(lambda blocks: blocks * BLOCK),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sub_ranges(
    make_bench: MakeBench, nbytes: int, stripe: int, fraction: float, seed: int
) -> None:
    bench: Bench = make_bench(2, stripe_bytes=stripe, weights=[2.0, 1.0], host_bytes=4 << 20)
    choose = random.Random(seed)
    record = bench.store.add(RecordSpec("w", Field.EXP_AVG, nbytes, Tier.NVME, fraction))
    model = bytearray(choose.randbytes(nbytes))
    bench.put(record, bytes(model))
    for _ in range(8):
        start = choose.randrange(0, nbytes, BLOCK)
        stop = choose.choice([nbytes, *range(start + BLOCK, nbytes, BLOCK)])
        if choose.random() < 0.5:
            model[start:stop] = choose.randbytes(stop - start)
            bench.put(record, bytes(model[start:stop]), start)
        else:
            assert bench.get(record, start, stop) == model[start:stop]
    assert bench.get(record) == model
    bench.store.close()
    bench.engine.close()


def test_records_do_not_touch_each_other(make_bench: MakeBench) -> None:
    bench = make_bench(2, stripe_bytes=BLOCK)
    choose = random.Random(7)
    records = [
        bench.store.add(
            RecordSpec(
                f"w{at}", Field.PARAM, choose.randrange(1, 40_000), Tier.NVME, choose.choice([0, 0.3])
            )
        )
        for at in range(40)
    ]
    contents = {record: os.urandom(record.nbytes) for record in records}
    for record in choose.sample(records, len(records)):
        bench.put(record, contents[record])
    for record in choose.sample(records, len(records)):
        assert bench.get(record) == contents[record]


def test_generations_are_separate(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(2)
    spec = RecordSpec("w", Field.PARAM, 50_000, Tier.NVME)
    old, new = bench.store.add(spec), bench.store.add(spec, generation=1)
    bench.put(old, b"o" * 50_000)
    bench.put(new, b"n" * 50_000)
    assert bench.get(old) == b"o" * 50_000
    assert bench.get(new) == b"n" * 50_000
    names = {path.name for path in tmp_path.glob("drive0/*/*")}
    assert names == {"run.lock", "gen0.bin", "gen1.bin"}


def test_bytes_are_laid_in_proportion_and_counted(make_bench: MakeBench) -> None:
    bench = make_bench(2, stripe_bytes=BLOCK, weights=[3.0, 1.0])
    record = bench.store.add(RecordSpec("w", Field.PARAM, 400 * BLOCK, Tier.NVME, 0.5))
    bench.put(record, os.urandom(400 * BLOCK))
    bench.get(record)
    stats = bench.store.stats()
    for path, share in zip(stats.paths, (150, 50), strict=True):
        assert abs(path.allocated_bytes - share * BLOCK) <= BLOCK
        assert path.read_bytes == path.written_bytes == path.allocated_bytes
    assert abs(stats.host_bytes - 200 * BLOCK) <= BLOCK
    assert stats.copied_bytes == 2 * stats.host_bytes
    assert (stats.num_records, stats.in_flight) == (1, 0)
    text = bench.store.describe()
    assert "75%" in text
    assert ("O_DIRECT" in text) == bench.store.direct


def test_host_records_are_used_in_place(make_bench: MakeBench) -> None:
    bench = make_bench(0)
    record = bench.store.add(RecordSpec("w", Field.PARAM, 10_000, Tier.HOST))
    assert bench.arena.contains(bench.store.view_address(record))
    assert bench.store.view_address(record, 8192) == bench.store.view_address(record) + 8192
    assert record.block is not None
    record.block.view()[:] = b"v" * 10_000
    with pytest.raises(StateError, match="never written"):
        bench.get(record)
    bench.store.mark_written(record)
    assert record.residency is Residency.HOST
    assert bench.get(record) == b"v" * 10_000
    in_place = bench.store.view_address(record)
    bench.store.write(record, 0, 10_000, in_place).wait()  # no copy onto itself
    assert bench.get(record) == b"v" * 10_000
    with pytest.raises(ValueError, match="10000"):
        bench.store.view_address(record, 10_000)


def test_only_host_records_have_an_address(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    record = bench.store.add(RecordSpec("w", Field.PARAM, 10_000, Tier.NVME, 0.5))
    with pytest.raises(StateError, match="read"):
        bench.store.view_address(record)
    with pytest.raises(StateError, match="write"):
        bench.store.mark_written(record)


def test_absent_records_and_ranges_cannot_be_read(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    record = bench.store.add(RecordSpec("layer.3", Field.MASTER_LO, 4 * BLOCK, Tier.NVME))
    with pytest.raises(StateError, match=r"layer.3/master_lo.*absent.*never written"):
        bench.get(record)
    bench.put(record, b"a" * BLOCK, BLOCK)
    assert bench.get(record, BLOCK, 2 * BLOCK) == b"a" * BLOCK
    with pytest.raises(StateError, match="never written"):
        bench.get(record, BLOCK, 3 * BLOCK)


@pytest.mark.parametrize(
    ("start", "stop"), [(1, 4096), (0, 4095), (4096, 4096), (0, 8193), (-4096, 4096)]
)
def test_ranges_that_no_transfer_can_have(make_bench: MakeBench, start: int, stop: int) -> None:
    bench = make_bench(1)
    record = bench.store.add(RecordSpec("w", Field.PARAM, 8192, Tier.NVME))
    buffer = bench.buffer(16384)
    with pytest.raises(ValueError, match="record w"):
        bench.store.write(record, start, stop, buffer.address)
    with pytest.raises(ValueError, match="multiples"):
        bench.store.write(record, 0, 8192, buffer.address + 512)


def test_what_does_not_fit_is_refused_and_changes_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(1, host_bytes=1 << 20)
    with pytest.raises(BudgetError, match=r"2097152 bytes.*'big'.*1048576.*host_memory"):
        bench.store.add(RecordSpec("big", Field.PARAM, 2 << 20, Tier.HOST))
    with pytest.raises(BudgetError):
        bench.store.add(RecordSpec("big", Field.PARAM, 4 << 20, Tier.NVME, 0.5))
    stats = bench.store.stats()
    assert (stats.num_records, stats.host_bytes, stats.paths[0].allocated_bytes) == (0, 0, 0)
    assert bench.arena.free_bytes == 1 << 20


def test_nvme_needs_paths(make_bench: MakeBench) -> None:
    bench = make_bench(0)
    assert bench.store.direct  # vacuously: nothing goes through the page cache
    with pytest.raises(ConfigError, match="no paths"):
        bench.store.add(RecordSpec("w", Field.PARAM, 100, Tier.NVME))


@pytest.mark.parametrize(
    "options", [{"stripe_bytes": 1000}, {"weights": [1.0]}, {"weights": [1.0, 0.0]}]
)
def test_options_that_cannot_work(make_bench: MakeBench, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_bench(2, **options)


def test_close_gives_everything_back(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(2)
    before = len(os.listdir("/proc/self/fd"))
    record = bench.store.add(RecordSpec("w", Field.PARAM, 1 << 20, Tier.NVME, 0.5))
    bench.store.add(RecordSpec("g", Field.GRAD, 1 << 20, Tier.NVME), generation=0)
    for _ in range(20):
        bench.put(record, bytes(1 << 20))
        bench.get(record)
    assert len(os.listdir("/proc/self/fd")) == before
    buffer = bench.buffer(1 << 20)
    unread = bench.store.write(record, 0, 1 << 20, buffer.address, buffer)
    bench.store.close()
    assert unread.done()
    assert list(tmp_path.glob("drive*/*")) == []
    bench.store.close()
    bench.arena.free(buffer)
    assert bench.arena.free_bytes == bench.arena.nbytes
    assert len(os.listdir("/proc/self/fd")) == before - 2 * 4  # parent, directory, lock, file
    with pytest.raises(StateError, match="closed"):
        bench.store.add(RecordSpec("x", Field.PARAM, 1, Tier.HOST))
    with pytest.raises(StateError, match="closed"):
        bench.store.read(record, 0, 1 << 20, buffer.address)


def test_two_stores_on_one_path_do_not_meet(make_bench: MakeBench) -> None:
    first, second = make_bench(1), make_bench(1)
    spec = RecordSpec("w", Field.PARAM, 100_000, Tier.NVME)
    one, two = first.store.add(spec), second.store.add(spec)
    first.put(one, b"1" * 100_000)
    second.put(two, b"2" * 100_000)
    assert first.get(one) == b"1" * 100_000
    first.store.close()
    assert second.get(two) == b"2" * 100_000


def test_padding_of_the_last_block_is_transferred(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    record = bench.store.add(RecordSpec("w", Field.PARAM, 5000, Tier.NVME))
    buffer = bench.buffer(b"x" * round_up(5000))
    bench.store.write(record, 0, 5000, buffer.address, buffer).wait()
    buffer.view()[:] = bytes(round_up(5000))
    bench.store.read(record, 0, 5000, buffer.address, buffer).wait()
    assert bytes(buffer.view()) == b"x" * round_up(5000)
