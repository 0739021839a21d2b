"""How the ranks of a group come together to open a communicator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from torch import distributed as dist

from tiermem.comm import compat
from tiermem.comm.board import Board
from tiermem.comm.link import describe_error
from tiermem.errors import RankError

OPEN_S = 300
"""For all ranks to come."""

_POLL_S = 0.02


def refuse_to_open(error: BaseException, run: int = 0) -> None:
    """Tells the ranks that open, or will open, a communicator with this one for ``run`` why it will
    not. Raises nothing."""
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return
    with contextlib.suppress(RuntimeError):  # the store is gone
        said = f"rank {world.rank()} failed: {describe_error(error)}; see its own output"
        _refusals(world, run).refuse(said)


def _refusals(world: dist.ProcessGroup, run: int) -> Board:
    store = compat.store_below(compat.group_store(world), f"tiermem/run/{run}")
    return Board(store, world.rank())


def meet(group: dist.ProcessGroup, names: Mapping[int, str], run: int) -> tuple[compat.Store, int]:
    """Waits until all ranks open the communicator, or one says that it will not. Where they have met,
    and its number.

    The group's first rank calls all others to a new place, each time, and says when all are there; they
    come to the newest. So ranks meet also after some have failed to, whichever these were. What was
    refused is looked at before one comes: a rank that has failed calls, or comes, for a later run."""
    assert dist.group.WORLD is not None
    refusals, rank = _refusals(dist.group.WORLD, run), group.rank()
    members = dist.get_process_group_ranks(group)
    calls = compat.group_store(group)
    met = f"tiermem/met/{rank}"
    latest = calls.add("tiermem/called", 1) - 1 if rank == 0 else calls.add(met, 0)
    board: Board | None = None
    end = time.monotonic() + OPEN_S
    try:
        while True:
            number = calls.add("tiermem/called", 0)
            failure = next(filter(None, map(refusals.refusal, members)), None)
            if failure is not None:
                raise RankError(f"{failure} ({names[rank]} was opening a communicator with it)")
            if number > latest:
                store, latest = compat.store_below(calls, f"tiermem/{number}"), number
                board = Board(store, rank)
                board.arrive()
            missing = [name for at, name in names.items() if board is None or not board.is_here(at)]
            if rank == 0 and board is not None and not missing:
                board.call_complete()
            if board is not None and board.is_complete():
                calls.set(met, str(number))
                return store, number
            if time.monotonic() > end:
                raise RankError(
                    f"{', '.join(missing)} did not open a communicator within {OPEN_S} s, while "
                    f"{names[rank]} waited: all ranks must make the same runtimes and shard the same "
                    f"models"
                )
            time.sleep(_POLL_S)
    except BaseException:
        if board is not None:
            board.withdraw()
        raise
