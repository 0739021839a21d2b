"""Blocks of an arena never overlap, cost what they take, and give everything back."""

from __future__ import annotations

import itertools
import logging
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.errors import BudgetError, StateError
from tiermem.memory.arena import Arena, Block
from tiermem.memory.ledger import Ledger
from tiermem.types import ALIGNMENT, Purpose, Tier, round_up

MIB = 1 << 20


def make(nbytes: int, *, pin: bool = False, budget: int | None = None) -> tuple[Arena, Ledger]:
    ledger = Ledger({Tier.HOST: nbytes if budget is None else budget})
    return Arena(nbytes, tier=Tier.HOST, ledger=ledger, pin=pin, device="cpu"), ledger


@pytest.fixture
def arena() -> Iterator[Arena]:
    made, _ = make(16 * MIB)
    yield made
    made.close(force=True)


def used(ledger: Ledger) -> int:
    return ledger.snapshot().tiers[Tier.HOST].used_bytes


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


def test_blocks_are_aligned_exact_and_writable(arena: Arena) -> None:
    block = arena.allocate(10_000, Purpose.GATHER)
    assert block is not None
    assert block.address % ALIGNMENT == 0
    assert (block.nbytes, block.capacity) == (10_000, 12_288)
    view = block.view()
    assert (len(view), view.format, view.readonly) == (10_000, "B", False)
    view[:] = b"\x07" * 10_000
    assert bytes(block.view()) == b"\x07" * 10_000
    assert arena.contains(block.address)
    assert not arena.contains(block.address + 16 * MIB)
    assert arena.free_bytes == 16 * MIB - 12_288


def test_the_whole_budget_is_usable_and_no_more() -> None:
    arena, ledger = make(8 * MIB)
    blocks = [arena.allocate(MIB, Purpose.GATHER) for _ in range(8)]
    assert all(blocks)
    assert arena.allocate(1, Purpose.GATHER) is None
    assert used(ledger) == 8 * MIB
    for block in blocks:
        assert block is not None
        arena.free(block)
    assert arena.largest_free == 8 * MIB
    assert used(ledger) == 0
    arena.close()


def test_a_ledger_without_room_is_as_a_full_arena() -> None:
    arena, _ = make(8 * MIB, budget=MIB)
    assert arena.allocate(2 * MIB, Purpose.GATHER) is None
    assert arena.free_bytes == 8 * MIB
    arena.close()


def test_best_fit_keeps_the_large_hole(arena: Arena) -> None:
    sizes = [1, 8, 1, 2, 1]
    blocks = [arena.allocate(size * MIB, Purpose.GATHER) for size in sizes]
    rest = arena.allocate(3 * MIB, Purpose.GATHER)
    assert rest is not None
    assert arena.free_bytes == 0
    hole, small = blocks[1], blocks[3]
    assert hole is not None
    assert small is not None
    arena.free(hole)
    arena.free(small)
    again = arena.allocate(2 * MIB, Purpose.OPTIMIZER)
    assert again is not None
    assert again.address == small.address
    assert arena.largest_free == 8 * MIB


def test_double_and_foreign_free_are_errors(arena: Arena) -> None:
    block = arena.allocate(100, Purpose.GATHER)
    assert block is not None
    arena.free(block)
    with pytest.raises(StateError, match="not lent"):
        arena.free(block)
    again = arena.allocate(100, Purpose.GATHER)
    assert again is not None
    assert again.address == block.address
    with pytest.raises(StateError, match="not lent"):
        arena.free(block)  # the address is out again, but not as this block
    arena.free(again)


@given(st.lists(st.tuples(st.integers(1, 40_000), st.integers(0, 30)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_sequence_keeps_blocks_disjoint_and_accounts_exact(actions: list[tuple[int, int]]) -> None:
    arena, ledger = make(64 * ALIGNMENT)
    out: list[Block] = []
    for nbytes, choice in actions:
        if choice % 3 == 0 and out:
            arena.free(out.pop(choice % len(out)))
        else:
            largest = arena.largest_free
            block = arena.allocate(nbytes, Purpose.GATHER)
            assert (block is None) == (round_up(nbytes) > largest)
            if block is not None:
                out.append(block)
        spans = sorted((block.address, block.address + block.capacity) for block in out)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        assert all(arena.contains(start) and arena.contains(stop - 1) for start, stop in spans)
        held = sum(block.capacity for block in out)
        assert used(ledger) == held == arena.nbytes - arena.free_bytes
    for block in out:
        arena.free(block)
    assert arena.largest_free == arena.nbytes
    arena.close()


def test_threads_get_disjoint_memory() -> None:
    arena, ledger = make(16 * MIB)
    clashes: list[str] = []

    def work(mark: int) -> None:
        for _ in range(200):
            block = arena.allocate(1 + mark * 5000, Purpose.GATHER)
            if block is None:
                continue
            view = block.view()
            view[:] = bytes([mark]) * block.nbytes
            if bytes(view) != bytes([mark]) * block.nbytes:
                clashes.append(f"thread {mark}")
            arena.free(block)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert used(ledger) == 0
    arena.close()


def test_close_refuses_while_blocks_are_out_and_names_them() -> None:
    arena, _ = make(8 * MIB)
    block = arena.allocate(5000, Purpose.OPTIMIZER)
    assert block is not None
    with pytest.raises(StateError, match=r"1 blocks.*optimizer: 8192 bytes.*force"):
        arena.close()
    arena.free(block)
    arena.close()
    arena.close()
    with pytest.raises(StateError, match="closed"):
        arena.allocate(1, Purpose.GATHER)


def test_memory_goes_only_when_nobody_looks_any_more() -> None:
    arena, ledger = make(8 * MIB)
    block = arena.allocate(5000, Purpose.GATHER)
    assert block is not None
    view = block.view()
    view[:3] = b"abc"
    address = block.address
    arena.close(force=True)
    assert bytes(view[:3]) == b"abc"
    arena.free(block)  # a finalizer may come late
    assert used(ledger) == 0
    del block
    assert mapped(address)
    assert bytes(view[:3]) == b"abc"
    del view
    assert not mapped(address)


def test_memory_is_touched_lazily_and_starts_on_a_huge_page() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    arena, _ = make(1 << 30, pin=True)
    block = arena.allocate(64 * MIB, Purpose.GATHER)
    assert block is not None
    assert block.address % (2 * MIB) == 0
    block.view()[:] = bytes(64 * MIB)
    grown = process.memory_info().rss - before
    assert grown < 200 * MIB  # the block, a temporary of its size, and nothing of the rest
    if arena.huge_pages == "advised":
        assert arena.huge_page_bytes() > 0
    arena.free(block)
    arena.close()


def test_an_arena_for_no_bytes_is_refused() -> None:
    with pytest.raises(BudgetError, match="4095"):
        make(4095)
    with pytest.raises(BudgetError, match="kernel refuses"):
        make(1 << 60)


def test_without_pin_nothing_is_locked() -> None:
    arena, ledger = make(8 * MIB)
    block = arena.allocate(MIB, Purpose.GATHER)
    assert block is not None
    assert arena.locked_bytes == ledger.snapshot().locked_bytes == 0
    arena.free(block)
    arena.close()


UNPRIVILEGED = """
    import ctypes, logging, os, resource, sys
    from tiermem.memory.arena import Arena
    from tiermem.memory.ledger import Ledger
    from tiermem.types import Purpose, Tier

    limit, nbytes = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    # CAP_IPC_LOCK is above the limit: drop all capabilities (_LINUX_CAPABILITY_VERSION_3).
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0

    class Count(logging.Handler):
        lines = []
        def emit(self, record):
            self.lines.append(record.getMessage())

    logging.getLogger().addHandler(Count())
    ledger = Ledger({Tier.HOST: nbytes})
    arena = Arena(nbytes, tier=Tier.HOST, ledger=ledger, pin=True, device="cpu")
    blocks = [arena.allocate(3 << 20, Purpose.GATHER) for _ in range(5)]
    print(arena.locked_bytes, ledger.snapshot().locked_bytes, len(Count.lines))
    print(*Count.lines)
    for block in filter(None, blocks):
        arena.free(block)
    kept = arena.locked_bytes
    again = arena.allocate(6 << 20, Purpose.GATHER)
    print(kept, arena.locked_bytes)
    arena.free(again)
    arena.close()
    print(ledger.snapshot().locked_bytes)
"""


@pytest.mark.parametrize(
    ("nbytes", "limit", "locked"),
    [(64 * MIB, 8 * MIB, 6 * MIB), (64 * MIB, 0, 0), (6 * MIB, 8 * MIB, 6 * MIB)],
)
def test_locks_up_to_the_limit_and_says_once_what_it_could_not(
    nbytes: int, limit: int, locked: int
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard != resource.RLIM_INFINITY and hard < limit:
        pytest.skip("the hard limit is lower")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNPRIVILEGED), str(limit), str(nbytes)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    first, message, second, last = result.stdout.split("\n")[:4]
    complete = locked == nbytes
    assert first == f"{locked} {locked} {0 if complete else 1}"
    if not complete:
        assert f"the limit is {limit} bytes" in message
        assert "ulimit -l" in message
    assert second == f"{locked} {locked}"
    assert last == "0"


def test_a_forked_child_cannot_corrupt_and_the_parent_is_not_charged(arena: Arena) -> None:
    block = arena.allocate(MIB, Purpose.GATHER)
    assert block is not None
    block.view()[:4] = b"here"
    child = os.fork()
    if child == 0:
        os._exit(1 if mapped(block.address) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(block.view()[:4]) == b"here"
    arena.free(block)


def test_an_arena_left_open_warns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    arena, _ = make(8 * MIB)
    with pytest.warns(ResourceWarning, match="host arena"):
        del arena


def test_registers_with_cuda() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ledger = Ledger({Tier.HOST: 64 * MIB})
    arena = Arena(64 * MIB, tier=Tier.HOST, ledger=ledger, pin=True, device="cuda")
    assert arena.registered
    block = arena.allocate(MIB, Purpose.STAGING)
    assert block is not None
    assert torch.frombuffer(block.view(), dtype=torch.uint8).is_pinned()
    arena.free(block)
    arena.close()
