"""Runs a test's function on several ranks: real processes with gloo between them.

    def work(rank: int, size: int, extra: str) -> str: ...   # at the top level of the test's module

    assert run_ranks(work, 2, "extra") == ["...", "..."]

Processes are forked from a server that has imported torch, so starting them takes a tenth of a second
after the first time. The store lies in the test's process, as it lies in torchrun's under torchrun, or
with ``store="rank 0"`` in that rank's. A time limit ends all of them and shows where each of them was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: it returned ``value``, raised (``error`` is the traceback), or neither."""

    value: Any
    error: str
    exit_code: int  # -9: killed
    seconds: float  # from the start of all ranks to its end


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    size: int
    port: int
    hosts_store: bool
    dump: str
    timeout_s: float


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, timeout_s: float = 60, store: str = "test"
) -> list[Any]:
    """``function(rank, size, *arguments)`` on each rank, with the default group initialized; what
    they returned, in rank order. Fails with the tracebacks if one raised or died."""
    outcomes = rank_outcomes(function, size, *arguments, timeout_s=timeout_s, store=store)
    bad = [
        f"rank {rank} (exit code {each.exit_code}):\n{each.error}"
        for rank, each in enumerate(outcomes)
        if each.error or each.exit_code
    ]
    if bad:
        raise AssertionError("\n".join(bad))
    return [each.value for each in outcomes]


def rank_outcomes(
    function: Callable[..., Any], size: int, *arguments: Any, timeout_s: float = 60, store: str = "test"
) -> list[Outcome]:
    """As `run_ranks`, for ranks that may raise or die. Fails if they do not end in time."""
    with contextlib.ExitStack() as stack:
        port, held = _find_store(store)
        stack.callback(lambda: held)
        dumps = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        context = _context()
        ranks = []
        for rank in range(size):
            hosts = rank == 0 and store == "rank 0"
            dump = str(dumps / str(rank))
            job = _Job(function, arguments, rank, size, port, hosts, dump, timeout_s)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(job, theirs), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(_end, process, ours)
            ranks.append((process, ours))
        return _collect(ranks, dumps, timeout_s)


def _context() -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the server, if it is not running yet
    context = multiprocessing.get_context("forkserver")
    # The last one is what `torch.compiler.disable` imports, for seconds, when a model is sharded.
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    return context


def _find_store(store: str) -> tuple[int, Any]:
    if store == "test":
        from torch.distributed import TCPStore

        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return server.port, server
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1], None


def _collect(ranks: list[tuple[Any, Any]], dumps: Path, timeout_s: float) -> list[Outcome]:
    start = time.monotonic()
    results: dict[int, Outcome] = {}
    received: dict[int, tuple[Any, str]] = {}
    while len(results) < len(ranks):
        left_s = start + timeout_s - time.monotonic()
        if left_s <= 0:
            raise AssertionError(_describe_hang(ranks, results, received, dumps, timeout_s))
        waiting = [p.sentinel for i, (p, _) in enumerate(ranks) if i not in results]
        waiting += [c for i, (_, c) in enumerate(ranks) if i not in received and i not in results]
        connection.wait(waiting, timeout=left_s)
        for rank, (process, ours) in enumerate(ranks):
            if rank not in received and ours.poll():
                with contextlib.suppress(EOFError):
                    received[rank] = ours.recv()
            if rank not in results and not process.is_alive():
                process.join()
                value, error = received.get(rank, (None, ""))
                results[rank] = Outcome(value, error, process.exitcode, time.monotonic() - start)
            elif rank not in received and ours.poll():
                time.sleep(0.01)  # end of file: the process ends soon
    return [results[rank] for rank in range(len(ranks))]


def _describe_hang(
    ranks: list[tuple[Any, Any]],
    results: dict[int, Outcome],
    received: dict[int, tuple[Any, str]],
    dumps: Path,
    timeout_s: float,
) -> str:
    lines = [f"not all ranks ended within {timeout_s} s"]
    for rank in range(len(ranks)):
        if rank in results:
            value = results[rank]
            lines.append(f"rank {rank} ended with {value.exit_code}: {value.error or value.value}")
        else:
            dump = dumps / str(rank)
            where = dump.read_text() if dump.exists() else ""
            said = received.get(rank, (None, ""))
            lines.append(f"rank {rank} runs (it has returned {said}):\n{where}")
    return "\n".join(lines)


def _end(process: Any, ours: Any) -> None:
    if process.is_alive():
        process.kill()
    process.join()
    ours.close()


def _work(job: _Job, theirs: Any) -> None:
    with open(job.dump, "w") as dump:
        faulthandler.dump_traceback_later(max(job.timeout_s - 3, 0.5), file=dump)
        try:
            with _default_group(job):
                answer = (job.function(job.rank, job.size, *job.arguments), "")
        except Exception:
            answer = (None, traceback.format_exc())
        theirs.send(answer)
        theirs.close()
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()


@contextlib.contextmanager
def _default_group(job: _Job) -> Iterator[None]:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=job.timeout_s)
    store = dist.TCPStore(
        "127.0.0.1", job.port, is_master=job.hosts_store, timeout=limit, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=limit)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
