"""Ctrl-C in the middle of a wait is raised when the wait is over, and the exchange goes on."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from ranks import run_ranks

from tiermem.comm import Kind, Message, open_communicator


def _interrupted(rank: int, size: int) -> None:
    comm = open_communicator(None)
    receives = [torch.zeros(8) for _ in range(size)]
    if rank:
        time.sleep(1.5)
    exchange = comm.exchange(Message(Kind.PARAMS, 0, "a"), [torch.ones(8)] * size, receives)
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            exchange.wait_received()
    exchange.wait()
    assert (receives[1 - rank] == 1).all()
    assert comm.gather_values("after", [rank]) == [(0.0,), (1.0,)]
    comm.close()


def test_interrupt_within_a_wait() -> None:
    run_ranks(_interrupted, 2)
