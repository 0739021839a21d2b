"""When a rank fails, dies or leaves, the ranks that wait for it learn why within seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from ranks import Outcome, rank_outcomes, run_ranks

from tiermem.comm import Communicator, Exchange, Kind, Message, open_communicator
from tiermem.errors import RankError, StateError

LAYER = Message(Kind.PARAMS, 7, "layers.3")


def _start(comm: Communicator, what: Message = LAYER, numel: int = 1000) -> Exchange:
    """One exchange of everybody with everybody."""
    sends = [torch.ones(numel) for _ in range(comm.size)]
    receives = [torch.zeros(numel) for _ in range(comm.size)]
    return comm.exchange(what, sends, receives)


def _expect_failure(comm: Communicator, numel: int = 1000) -> str:
    """The error of a rank that waits for the others, and leaves as a runtime would."""
    with pytest.raises(RankError) as caught:
        for _ in range(3):
            _start(comm, numel=numel).wait()
    comm.fail(caught.value)
    comm.close(failed=True)
    return str(caught.value)


def _leave(rank: int, size: int, way: str) -> str:
    comm = open_communicator(None)
    _start(comm).wait()
    if rank != size - 1:
        return _expect_failure(comm)
    time.sleep(0.5)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "exit":
        os._exit(3)
    if way == "raises":
        comm.fail(ValueError("a bad batch"))
        comm.close(failed=True)
    if way == "closes":
        comm.close()
    return "left"


EXPECTED = {
    "killed": "died without a word",
    "exit": "died without a word",
    "raises": "failed: ValueError: a bad batch",
    "closes": "closed its runtime after 1 exchanges, last: layers.3",
}


def _check(outcomes: list[Outcome], way: str) -> None:
    last = len(outcomes) - 1
    for outcome in outcomes[:-1]:
        assert outcome.error == ""
        assert f"rank {last} {EXPECTED[way]}" in outcome.value
        assert outcome.seconds < 20
    assert "layers.3" in outcomes[0].value
    assert outcomes[-1].exit_code == {"killed": -signal.SIGKILL, "exit": 3}.get(way, 0)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", sorted(EXPECTED))
def test_others_learn_why_a_rank_left(way: str, size: int) -> None:
    _check(rank_outcomes(_leave, size, way, timeout_s=40), way)


def _host_dies(rank: int, size: int, way: str) -> str:
    """Rank 0, which hosts the store, is the one that goes."""
    comm = open_communicator(None)
    _start(comm).wait()
    if rank:
        return _expect_failure(comm)
    time.sleep(0.3)
    if way == "raises":
        comm.fail(ValueError("a bad batch"))
        comm.close(failed=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@pytest.mark.parametrize("way", ["killed", "raises"])
def test_the_host_of_the_store_goes(way: str) -> None:
    outcomes = rank_outcomes(_host_dies, 3, way, timeout_s=40, store="rank 0")
    for outcome in outcomes[1:]:
        assert outcome.error == ""
        assert outcome.seconds < 20
    text = " ".join(outcome.value for outcome in outcomes[1:])
    assert f"rank 0 {EXPECTED[way]}" in text


def _fail_without_closing(rank: int, size: int) -> str:
    """Rank 1 says that it fails and goes on with something else; rank 2 computes."""
    comm = open_communicator(None)
    _start(comm).wait()
    if rank == 0:
        with pytest.raises(RankError) as caught:
            _start(comm).wait()
        comm.close(failed=True)
        return str(caught.value)
    if rank == 1:
        comm.fail(MemoryError("no room"))
        comm.fail(ValueError("later"))
        time.sleep(5)
        with pytest.raises(RankError, match="no room"):
            comm.check()
        comm.close(failed=True)
        return ""
    end = time.monotonic() + 20
    with pytest.raises(RankError, match="rank 1 failed: MemoryError: no room"):
        while time.monotonic() < end:
            time.sleep(0.1)
            comm.check()
    with pytest.raises(RankError, match="no room"):
        _start(comm)
    comm.close(failed=True)
    return ""


def test_failure_is_seen_without_waiting_and_wakes() -> None:
    values = run_ranks(_fail_without_closing, 3, timeout_s=40)
    assert "rank 1 failed: MemoryError: no room" in values[0]
    assert "layers.3" in values[0]


def _blocked_send(rank: int, size: int) -> str:
    """Rank 0 waits for rank 1 to take something."""
    comm = open_communicator(None)
    if rank == 0:
        exchange = comm.exchange(LAYER, [None, torch.ones(1 << 22)], [None, None])
        exchange.wait_received()
        with pytest.raises(RankError, match="rank 1 to take") as caught:
            exchange.wait()
        comm.close(failed=True)
        return str(caught.value)
    comm.fail(ValueError("a bad batch"))
    time.sleep(4)
    comm.close(failed=True)
    return ""


def test_blocked_send_is_woken() -> None:
    assert "a bad batch" in run_ranks(_blocked_send, 2, timeout_s=40)[0]


def _own_threads(rank: int, size: int) -> float:
    """close() of a failed rank wakes its own threads too, with the help of the others."""
    comm = open_communicator(None)
    comm.gather_values("start", [])
    if rank:
        time.sleep(3)
        with pytest.raises(RankError):
            comm.check()
        comm.close(failed=True)
        return 0.0
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            _start(comm).wait()
        except RankError as error:
            caught.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.3)
    comm.fail(ValueError("a bad batch"))
    comm.close(failed=True)
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert "a bad batch" in str(caught[0])
    return 0.0


def test_failing_rank_wakes_its_own_threads() -> None:
    run_ranks(_own_threads, 2, timeout_s=40)


def _close_early(rank: int, size: int) -> None:
    """A rank that closes still delivers what others take later."""
    comm = open_communicator(None)
    data = torch.zeros(1 << 20)
    if rank == 0:
        comm.exchange(LAYER, [None, data + 1], [None, None])
        comm.close()
    else:
        time.sleep(6)
        comm.exchange(LAYER, [None, None], [data, None]).wait()
        assert (data == 1).all()
        comm.close()


def test_closing_delivers_what_was_posted() -> None:
    run_ranks(_close_early, 2, timeout_s=40)


def _error_stays(rank: int, size: int) -> None:
    comm = open_communicator(None)
    exchange = _start(comm)
    exchange.wait_received()
    comm.close(failed=True)
    for _ in range(2):
        with pytest.raises((RankError, StateError)):
            exchange.wait()
    with pytest.raises((RankError, StateError)):
        _start(comm)


def test_exchange_after_close() -> None:
    run_ranks(_error_stays, 2, timeout_s=40)


def _in_a_block(rank: int, size: int) -> str:
    with open_communicator(None) as comm:
        comm.gather_values("start", [])
    with pytest.raises((ValueError, RankError)) as caught, open_communicator(None) as comm:
        if rank == 0:
            raise ValueError("a bad batch")
        _start(comm).wait()
    return str(caught.value)


def test_block_tells_the_others() -> None:
    values = run_ranks(_in_a_block, 2, timeout_s=40)
    assert values[0] == "a bad batch"
    assert "rank 0 failed: ValueError: a bad batch" in values[1]


SCRIPT = """
    import signal, sys, torch
    from torch import distributed as dist
    from tiermem.comm import Kind, Message, open_communicator
    from tiermem.errors import RankError
    dist.init_process_group("gloo")
    comm = open_communicator(None)
    comm.gather_values("start", [0.0])
    rank, way = comm.rank, sys.argv[1]
    what = Message(Kind.PARAMS, 0, "layers.0")
    if way == "both":  # with an exchange under way, and no close
        exchange = comm.exchange(what, [torch.ones(9)] * 2, [torch.zeros(9) for _ in range(2)])
        print("ends", flush=True)
    elif rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when the other has raised
        try:
            comm.exchange(what, [torch.ones(9)] * 2, [torch.zeros(9) for _ in range(2)]).wait()
        except RankError as error:
            print("seen:", error, flush=True)
    elif way == "raises":
        raise ValueError("a bad batch")
"""


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("both", "ends"),
        (
            "ends",
            "rank 1 ended its process without closing its runtime, after 1 exchanges, last: start",
        ),
        ("raises", "last: start: ValueError: a bad batch"),
    ],
)
def test_process_ends_without_close(way: str, expected: str, tmp_path: Path, repository: Path) -> None:
    """Under torchrun, as people run it; the interpreter must end, and end well."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), way],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
    )
    assert expected in done.stdout, done.stderr
    assert (done.returncode != 0) == (way == "raises")
    assert not re.search("SIG(?!TERM)", done.stderr)  # torchrun ends others by SIGTERM
