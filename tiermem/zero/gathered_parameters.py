"""`GatheredParameters`: DeepSpeed's way to look at parameters whole, and to write them from one rank.

[Note: undecided writes] Which writes inside a block are kept is decided at its end. Until then nothing
of its groups is written back (``ParamGroup.unsettled``), although a use of a parameter otherwise looks
for writes. A block that keeps none gives up the groups' leases afterwards, so that the next gather
reads what the store has; where a lease has to stay (the group lives on the device, or something else
uses it) the block copies it when it begins. A block that keeps the writes of one rank sends that rank's
whole groups to all others, and takes for written what has other bits than at its beginning: torch does
not count writes through ``.data``, and the masters of what is as it was must keep their lower bits.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from tiermem.comm import MAX_INDEX, Exchange, Kind, Message
from tiermem.errors import ConfigError
from tiermem.zero.access import find_handle
from tiermem.zero.group import ParamGroup
from tiermem.zero.param import ShardedParam
from tiermem.zero.room import is_idle
from tiermem.zero.runtime import Runtime


class GatheredParameters:
    """Inside the block ``params`` (one, or any number) are whole, and their ``.data`` works.

    With ``modifier_rank``, a rank of the default group, what that rank has written when the block ends,
    by any means, is what all ranks keep; masters of what was written are rebuilt from it. Without it
    nothing that is written inside is kept. Of nested blocks over the same parameters the outermost
    decides. All ranks enter and leave it alike. An optimizer's ``step()`` inside raises `StateError`.

    Parameters that are not sharded are left alone, and so are the whole ones that
    ``model.parameters()`` gives inside another block. ``fwd_module`` has no meaning here: a parameter
    that another module uses is gathered when it is used. With ``enabled=False`` nothing happens. Raises
    `BudgetError` if the groups of the parameters, which are gathered whole, do not fit device memory at
    once (without ``modifier_rank`` what stays on the device is copied beside it), and `ConfigError` for
    a rank that does not share them.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | torch.Tensor,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        handles = [find_handle(param) for param in given] if enabled else []
        self._groups = list(dict.fromkeys(handle.group for handle in handles if handle is not None))
        self._modifier_rank = modifier_rank
        self._stack = ExitStack()

    def __enter__(self) -> None:
        by_runtime: dict[Runtime, list[ParamGroup]] = {}
        for group in self._groups:
            if self._modifier_rank is not None:
                _position(group, self._modifier_rank)
            by_runtime.setdefault(group.runtime, []).append(group)
        with ExitStack() as opened:
            for runtime, groups in by_runtime.items():
                if self._modifier_rank is None:
                    opened.enter_context(_keeping_none(runtime, groups))
                else:
                    opened.enter_context(_keeping_those_of(self._modifier_rank, runtime, groups))
            self._stack = opened.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


@contextmanager
def _keeping_none(runtime: Runtime, groups: Sequence[ParamGroup]) -> Iterator[None]:
    """Holds ``groups``, all of one runtime, unsharded; forgets what is written."""
    stay = [group for group in groups if _stays(runtime, group)]
    leave = [group for group in groups if group not in stay]
    with _giving_up(runtime, leave), runtime.forward.gathered(groups, modify=False):
        _settle(runtime, groups)
        copies = {group: _image(group).clone() for group in stay}
        try:
            _count(groups, 1)
            yield
        finally:
            with runtime.interrupts, torch.inference_mode(False), torch.no_grad():
                _count(groups, -1)
                for group in filter(_is_here, groups):
                    group.note_writes()
                    group.version += bool(group.written)  # graphs made with them are out of date
                    group.attach()
                    if group in copies:
                        _image(group).copy_(copies[group])
                    group.mark_clean()


@contextmanager
def _giving_up(runtime: Runtime, groups: Sequence[ParamGroup]) -> Iterator[None]:
    """Gives up the leases of ``groups`` at the end."""
    try:
        yield
    finally:
        with runtime.interrupts:
            for group in filter(is_idle, groups):
                runtime.gather.drop(group)


def _stays(runtime: Runtime, group: ParamGroup) -> bool:
    """Whether the group's lease may outlive a block that is about to begin."""
    kept = group.persistent or group.anchored or group.record is None
    return kept or group.uses > 0 or runtime.backward.pins(group)


@contextmanager
def _keeping_those_of(rank: int, runtime: Runtime, groups: Sequence[ParamGroup]) -> Iterator[None]:
    """Holds ``groups``, all of one runtime, unsharded; keeps what ``rank`` has written."""
    with runtime.forward.gathered(groups, modify=False):
        _settle(runtime, groups)
        before = {param: _digest(param) for group in groups for param in group.params}
        try:
            _count(groups, 1)
            yield
        finally:
            with runtime.interrupts, torch.inference_mode(False), torch.no_grad():
                _count(groups, -1)
                here = list(filter(_is_here, groups))
                for group in here:
                    group.adopt_replaced()
                _send(rank, runtime, here)
                for group in here:
                    changed = [param for param in group.params if _digest(param) != before[param]]
                    group.mark_clean()
                    group.version += bool(changed)
                    if not group.unsettled:
                        group.written.update(dict.fromkeys(changed))


def _settle(runtime: Runtime, groups: Sequence[ParamGroup]) -> None:
    """What was written before counts."""
    with runtime.interrupts:
        for group in groups:
            runtime.gather.settle(group)


def _count(groups: Sequence[ParamGroup], blocks: int) -> None:
    for group in groups:
        group.unsettled += blocks


def _is_here(group: ParamGroup) -> bool:
    """Whether the group is still gathered: it is not if the runtime was closed meanwhile."""
    return group.unsharded and group.lease is not None


def _send(rank: int, runtime: Runtime, groups: Sequence[ParamGroup]) -> None:
    """The values of ``rank`` on all ranks, whole groups."""
    runtime.gather.shares.start_owed()
    exchanges: list[Exchange] = []
    for group in groups:
        comm, source = group.sharing.comm, _position(group, rank)
        if comm.size == 1:
            continue
        image, own = _image(group), comm.rank == source
        number = zlib.crc32(f"written {group.name} {group.updates}".encode()) & MAX_INDEX
        message = Message(Kind.WHOLE, number, f"{group.name} (as written)", group.updates)
        receives = [image if at == source and not own else None for at in range(comm.size)]
        exchanges.append(comm.exchange(message, [image if own else None] * comm.size, receives))
    for exchange in exchanges:
        exchange.wait()


def _position(group: ParamGroup, rank: int) -> int:
    """Which of those that share the group is ``rank`` of the default group. Raises `ConfigError`."""
    names = group.sharing.comm.names
    everybody = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if len(names) == 1 and type(rank) is int and 0 <= rank < everybody:  # nothing is sent
        return 0
    found = [at for at, name in names.items() if type(rank) is int and name == f"rank {rank}"]
    if not found:
        raise ConfigError(
            f"modifier_rank is {rank!r}, but {group.name!r} is shared by "
            f"{', '.join(names.values())} only"
        )
    return found[0]


def _image(group: ParamGroup) -> torch.Tensor:
    """The group's bytes in device memory."""
    assert group.lease is not None
    return group.lease.tensor[: group.nbytes]


def _digest(param: ShardedParam) -> bytes:
    """Tells whether a parameter has other bits than before."""
    data = param.values.view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.data, digest_size=16).digest()
