"""Child processes, such as those of a DataLoader, inherit the connections: that must not keep other
ranks from learning that a rank has closed its own."""

from __future__ import annotations

import os
import time
import weakref

import pytest
import torch
from ranks import run_ranks

from tiermem.comm import Kind, Message, open_communicator
from tiermem.errors import RankError


def _leave_with_child(rank: int, size: int, failed: bool) -> float:
    comm = open_communicator(None)
    comm.gather_values("start", [])
    what = Message(Kind.PARAMS, 0, "layers.0")
    if rank == 0:
        receive = torch.zeros(100)
        start = time.monotonic()
        with pytest.raises(RankError, match="a bad batch" if failed else "rank 1 closed its runtime"):
            comm.exchange(what, [None, None], [None, receive]).wait()
        seconds = time.monotonic() - start
        comm.close(failed=True)
        return seconds
    child = os.fork()
    if child == 0:
        time.sleep(25)
        os._exit(0)
    if failed:
        comm.fail(ValueError("a bad batch"))
    comm.close(failed=failed)
    return 0.0


def _child_exits(rank: int, size: int) -> None:
    comm = open_communicator(None)
    comm.gather_values("start", [])
    child = os.fork()
    if child == 0:
        try:
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # as the interpreter's end does
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert comm._link.board.num_left() == 0
    comm.gather_values("end", [0.0])
    comm.close()


def test_child_that_ends_is_no_rank_that_leaves() -> None:
    run_ranks(_child_exits, 2, timeout_s=40)


@pytest.mark.parametrize("failed", [True, False])
def test_leaving_with_child_processes(failed: bool) -> None:
    assert run_ranks(_leave_with_child, 2, failed, timeout_s=40)[0] < 15
