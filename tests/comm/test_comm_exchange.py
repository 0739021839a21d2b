"""What is sent arrives, whatever the number of ranks, the sizes, dtypes, threads and order."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from ranks import run_ranks
from torch import distributed as dist

from tiermem.comm import Communicator, Kind, Message, open_communicator, single
from tiermem.errors import StateError


def _all_to_all(comm: Communicator, what: Message, numel: int, dtype: torch.dtype) -> None:
    size, rank = comm.size, comm.rank
    sends = [torch.full((numel,), 10 * rank + peer, dtype=dtype) for peer in range(size)]
    receives = [torch.zeros(numel, dtype=dtype) for _ in range(size)]
    exchange = comm.exchange(what, sends, receives)
    exchange.wait_received()
    for peer in range(size):
        expected = 10 * peer + rank if peer != rank else 0
        assert torch.equal(receives[peer], torch.full((numel,), expected, dtype=dtype))
    exchange.wait()
    exchange.wait()


def _exchange_dtypes(rank: int, size: int) -> None:
    comm = open_communicator(None)
    assert (comm.rank, comm.size) == (rank, size)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.int64)
    for round_ in range(2):
        for index, dtype in enumerate(dtypes):
            _all_to_all(comm, Message(Kind.PARAMS, index, str(dtype)), 1000 * (round_ + 1), dtype)
    comm.close()
    comm.close()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_exchange_between_ranks(size: int) -> None:
    run_ranks(_exchange_dtypes, size)


def _exchange_parts(rank: int, size: int) -> None:
    """Rank 0 sends different sizes to each, and only it sends."""
    comm = open_communicator(None)
    what = Message(Kind.PARAMS, 3, "parts")
    data = [torch.arange(100 * peer) for peer in range(size)]
    if rank == 0:
        comm.exchange(what, data, [None] * size).wait()
    else:
        got = torch.zeros(100 * rank, dtype=torch.int64)
        comm.exchange(what, [None] * size, [got] + [None] * (size - 1)).wait_received()
        assert torch.equal(got, data[rank])
    nothing = [torch.empty(0)] * size
    comm.exchange(what, nothing, nothing).wait()
    assert comm.gather_values("norms", [rank + 0.1, 1 / (rank + 3)]) == [
        (r + 0.1, 1 / (r + 3)) for r in range(size)
    ]
    assert comm.gather_values("none", []) == [()] * size
    assert comm.gather_texts("words", "é" * rank) == ["é" * r for r in range(size)]
    comm.close()


def test_parts_of_different_sizes_and_values() -> None:
    run_ranks(_exchange_parts, 3)


def _ask(rank: int, size: int) -> None:
    """Rank 1 sends at once and takes what comes half a second later."""
    comm = open_communicator(None)
    numel = 8_000_000  # more than sockets hold
    data, got = torch.full((numel,), float(rank)), torch.zeros(numel)
    for index in range(2):
        what = Message(Kind.PARAMS, index, "asked")
        other = Message(Kind.PARAMS, 10 + index, "other way")
        start = time.monotonic()
        if rank == 0:
            exchange = comm.exchange(what, [None, data], [None, None])
            back = comm.exchange(other, [None, None], [None, got])
            if index:
                assert back.received_within(10)
            assert back.over_within(10)
            assert back.over_within(0)
            assert not exchange.over_within(0.05)
            assert exchange.over_within(10)
            assert time.monotonic() - start > 0.4
            exchange.wait()
            back.wait()
            assert exchange.done
            assert (got == 1).all()
        else:
            comm.exchange(other, [data, None], [None, None]).wait()
            time.sleep(0.5)
            comm.exchange(what, [None, None], [got, None]).wait()
            assert (got == 0).all()
    comm.close()


def test_asking_whether_an_exchange_is_over() -> None:
    run_ranks(_ask, 2)


def _exchange_many(rank: int, size: int, threads: int) -> None:
    comm = open_communicator(None)
    failures = []

    def work(thread: int) -> None:
        try:
            order = list(range(40))
            random.Random(100 * rank + thread).shuffle(order)
            started = []
            for index in order:
                what = Message(Kind.GRADIENTS, 40 * thread + index, "many")
                sends = [torch.full((100 + index,), rank * 1000 + index)] * size
                receives = [torch.zeros(100 + index, dtype=torch.int64) for _ in range(size)]
                started.append((index, receives, comm.exchange(what, sends, receives)))
            random.Random(rank - thread).shuffle(started)
            for index, receives, exchange in started:
                exchange.wait()
                for peer in set(range(size)) - {rank}:
                    assert (receives[peer] == peer * 1000 + index).all()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    comm.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_concurrent_exchanges_in_different_orders(threads: int) -> None:
    run_ranks(_exchange_many, 3, threads)


def _exchange_ahead(rank: int, size: int) -> None:
    """Rank 0 is 200 exchanges of one message ahead: numbers come round again."""
    comm = open_communicator(None)
    what = Message(Kind.PARAMS, 0, "ahead")
    receives = [torch.zeros(8, dtype=torch.int64) for _ in range(200)]
    exchanges = []
    for step in range(200):
        if rank == 0:
            exchanges.append(comm.exchange(what, [None, torch.full((8,), step)], [None, None]))
        else:
            exchanges.append(comm.exchange(what, [None, None], [receives[step], None]))
            exchanges[-1].wait_received()
    for exchange in exchanges:
        exchange.wait()
    if rank == 1:
        assert [int(each[0]) for each in receives] == list(range(200))
    comm.close()


def test_one_rank_far_ahead() -> None:
    run_ranks(_exchange_ahead, 2)


def _exchange_in_mesh(rank: int, size: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    comms = {name: open_communicator(mesh.get_group(name)) for name in ("dp", "tp")}
    assert comms["dp"].gather_values("rank", [rank]) == [(rank % 2,), (rank % 2 + 2,)]
    assert comms["tp"].gather_values("rank", [rank]) == [(rank // 2 * 2,), (rank // 2 * 2 + 1,)]
    for comm in comms.values():
        comm.close()


def test_groups_of_a_mesh() -> None:
    run_ranks(_exchange_in_mesh, 4)


def _reopen(rank: int, size: int) -> None:
    open_ones = [open_communicator(None) for _ in range(2)]
    for turn in range(3):
        for comm in open_ones:
            assert comm.gather_values("turn", [rank, turn]) == [(r, turn) for r in range(size)]
        open_ones.pop(0).close()
        open_ones.append(open_communicator(None))
    for comm in open_ones:
        comm.close()


def test_several_communicators_one_after_another() -> None:
    run_ranks(_reopen, 2)


def _exchange_large(rank: int, size: int) -> None:
    comm = open_communicator(None)
    numel = (1 << 31) + 4096
    what = Message(Kind.PARAMS, 0, "large")
    if rank == 0:
        data = torch.ones(numel, dtype=torch.uint8)
        data[-1] = 7
        comm.exchange(what, [None, data], [None, None]).wait()
    else:
        data = torch.zeros(numel, dtype=torch.uint8)
        comm.exchange(what, [None, None], [data, None]).wait()
        assert data.count_nonzero() == numel
        assert data[-1] == 7
    comm.close()


@pytest.mark.slow
def test_more_than_two_gibibytes_at_once() -> None:
    run_ranks(_exchange_large, 2, timeout_s=200)


def test_single_rank_without_torch_distributed() -> None:
    comm = single()
    assert not dist.is_initialized()
    _all_to_all(comm, Message(Kind.PARAMS, 0, "alone"), 10, torch.float32)
    assert comm.gather_values("alone", [0.5]) == [(0.5,)]
    comm.check()
    comm.close()
    with pytest.raises(StateError, match="after close"):
        comm.gather_values("late", [0.5])


@pytest.mark.parametrize(
    ("what", "tensor", "match"),
    [
        (Message(Kind.PARAMS, 0, "x"), torch.zeros(4, 4).T, "contiguous"),
        (Message(Kind.PARAMS, 0, "x"), torch.zeros(4, device="meta"), "meta"),
        (Message(Kind.PARAMS, 65536, "x"), torch.zeros(4), "65536"),
        (Message(Kind.PARAMS, 0, "x"), None, "1 tensors for 2 ranks"),
    ],
)
def test_what_cannot_be_exchanged(what: Message, tensor: torch.Tensor | None, match: str) -> None:
    run_ranks(_refuse, 2, what, [tensor] * (1 if tensor is None else 2), match)


def _refuse(
    rank: int, size: int, what: Message, tensors: list[torch.Tensor | None], match: str
) -> None:
    comm = open_communicator(None)
    with pytest.raises(StateError, match=match):
        comm.exchange(what, tensors, tensors)
    comm.close()
