"""Ranks that do different things next are told so; ranks that are only slow never are."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from ranks import rank_outcomes, run_ranks

from tiermem.comm import Communicator, Exchange, Kind, Message, open_communicator
from tiermem.comm import watch as watch_module
from tiermem.errors import RankError


def _with_all(comm: Communicator, name: str, numel: int = 1000) -> Exchange:
    index = int(name.rpartition(".")[2])
    sends = [torch.ones(numel) for _ in range(comm.size)]
    receives = [torch.zeros(numel) for _ in range(comm.size)]
    return comm.exchange(Message(Kind.PARAMS, index, name), sends, receives)


def _to(comm: Communicator, peer: int, index: int) -> Exchange:
    sends = [torch.ones(1000) if r == peer else None for r in range(comm.size)]
    return comm.exchange(Message(Kind.GRADIENTS, index, f"g.{index}"), sends, [None] * comm.size)


def _from(comm: Communicator, peer: int, index: int) -> Exchange:
    receives = [torch.zeros(1000) if r == peer else None for r in range(comm.size)]
    return comm.exchange(Message(Kind.GRADIENTS, index, f"g.{index}"), [None] * comm.size, receives)


def _expect(comm: Communicator, wait: object) -> str:
    assert callable(wait)
    with pytest.raises(RankError) as caught:
        wait()
    comm.fail(caught.value)
    comm.close(failed=True)
    return str(caught.value)


def _different_layers(rank: int, size: int) -> str:
    """Rank 0 takes another branch than all others."""
    comm = open_communicator(None)
    _with_all(comm, "layers.1").wait()
    exchange = _with_all(comm, "layers.2" if rank == 0 else "layers.3")
    return _expect(comm, exchange.wait_received)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_different_layers(size: int) -> None:
    outcomes = rank_outcomes(_different_layers, size, timeout_s=45)
    for outcome in outcomes:
        assert outcome.error == ""
        assert "ranks disagree about what comes next" in outcome.value
        assert "layers.2" in outcome.value
        assert "layers.3" in outcome.value
        assert "rank 0 waits for" in outcome.value
        assert outcome.seconds < 25


def _different_sizes(rank: int, size: int) -> str:
    comm = open_communicator(None)
    return _expect(comm, _with_all(comm, "layers.1", numel=1000 + rank).wait)


def test_different_sizes_do_not_end_the_process() -> None:
    for value in run_ranks(_different_sizes, 2, timeout_s=45):
        assert "4000 bytes" in value
        assert "4004" in value


def _sends_only(rank: int, size: int) -> str:
    """Each waits for the other to take something first."""
    comm = open_communicator(None)
    exchange = _to(comm, 1 - rank, index=rank)
    return _expect(comm, exchange.wait)


def test_sends_that_nobody_takes() -> None:
    for value in run_ranks(_sends_only, 2, timeout_s=45):
        assert "waits for rank 1 to take gradients of 'g.0'" in value
        assert "waits for rank 0 to take gradients of 'g.1'" in value


def _circle(rank: int, size: int, same: bool) -> str:
    """Each waits for the next one, which sends only later; all threads of each. With ``same`` all are
    in the same exchange, to which nobody contributes."""
    comm = open_communicator(None)
    texts = []

    def wait(index: int) -> None:
        with pytest.raises(RankError) as caught:
            _from(comm, (rank + 1) % size, index if same else 10 * rank + index).wait()
        texts.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.fail(RankError(texts[0]))
    comm.close(failed=True)
    return texts[0]


@pytest.mark.parametrize("same", [False, True])
def test_circle_of_three(same: bool) -> None:
    for value in run_ranks(_circle, 3, same, timeout_s=45):
        assert value.count("waits for gradients") >= 3


def _slow(rank: int, size: int) -> None:
    """All that is legal, and slow enough for the watches to look at it forty times."""
    watch_module._LONG_WAIT_NS = 200_000_000
    watch_module._PERIOD_S = watch_module._BUSY_PERIOD_S = 0.05
    comm = open_communicator(None)
    if rank == 0:  # computes, while the others wait
        time.sleep(2)
    _with_all(comm, "layers.1").wait()
    # Rank 1 waits for rank 0, which waits for what rank 1 has already posted, and for rank 2.
    if rank == 0:
        _from(comm, 2, 5).wait()
        _to(comm, 1, 6).wait()
    elif rank == 1:
        _from(comm, 0, 6).wait()
    else:
        time.sleep(2)
        _to(comm, 0, 5).wait()
    # Both main threads wait for what another thread of the other rank posts after a while.
    if rank < 2:
        _two_threads(comm, 1 - rank)
    # Rank 0 runs ahead by whole exchanges.
    ahead = [_with_all(comm, f"layers.{index}") for index in range(10, 16)]
    for exchange in ahead:
        time.sleep(0.3 * rank)
        exchange.wait()
    comm.close()


def _two_threads(comm: Communicator, peer: int) -> None:
    def later() -> None:
        sends = [torch.ones(5) if r == peer else None for r in range(comm.size)]
        receives = [torch.ones(5) if r == peer else None for r in range(comm.size)]
        comm.exchange(Message(Kind.VALUES, 9, "v.9"), sends, receives).wait()
        time.sleep(2)
        _to(comm, peer, 20 + comm.rank).wait()

    thread = threading.Thread(target=later)
    thread.start()
    time.sleep(0.3)
    _from(comm, peer, 20 + peer).wait()
    thread.join()


def test_slow_ranks_are_never_accused() -> None:
    run_ranks(_slow, 3, timeout_s=100)


def _warned(rank: int, size: int) -> list[str]:
    watch_module._LONG_WAIT_NS = watch_module._WARN_NS = 500_000_000
    watch_module._PERIOD_S = watch_module._BUSY_PERIOD_S = 0.1
    comm = open_communicator(None)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tiermem.comm.watch").addHandler(handler)
    time.sleep(2 if rank else 0)
    _with_all(comm, "layers.1").wait()
    comm.close()
    return seen


def test_long_wait_is_warned_of_each_time_it_has_doubled() -> None:
    values = run_ranks(_warned, 2, timeout_s=45)
    assert len(values[0]) in (2, 3)  # after 0.5, 1 and perhaps 2 s
    for said in values[0]:
        assert "rank 0 waits for parameters of 'layers.1' (exchange 0 of it) from rank 1, for" in said
        assert "look for `if rank == 0`" in said
    assert values[1] == []
