"""Reading and editing optimizer states outside of updates: ``state_dict``, loading, user writes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import torch

from tiermem.comm import MAX_INDEX, Kind, Message
from tiermem.errors import StateError
from tiermem.memory.lease import tensor_over
from tiermem.types import ALIGNMENT, Field, round_up
from tiermem.zero.group import Region, StateRecord
from tiermem.zero.param import ShardedParam
from tiermem.zero.update import UpdatePipeline


class StateAccess:
    """One parameter's part of a state, in chunks through an update slot. Training thread only,
    and only while no update is under way (`UpdatePipeline.borrow` sees to that)."""

    def __init__(self, pipeline: UpdatePipeline) -> None:
        self._pipeline = pipeline

    def read(self, region: Region, name: str, param: ShardedParam) -> torch.Tensor:
        """A new tensor of the parameter's shape and stride with its state ``name``, which has a value
        for each element; zeros if it was never written. Over several ranks all of them call it."""
        spec = param.segment.spec
        values = self.read_values(region, name, param)
        return param.wrap(values.as_strided(spec.shape, spec.stride))

    def read_values(self, region: Region, name: str, param: ShardedParam) -> torch.Tensor:
        """The values of the parameter's state ``name``, 1-D, in its memory order; zeros if it was never
        written. Over several ranks all of them call it."""
        state = region.states[name]
        result = torch.zeros(state.spec.count(param.spec.numel), dtype=state.dtype)
        if name in region.initialised:
            for part, position in self._parts(region, name, param, write=False):
                result[position : position + part.numel()] = part
            if region.owned.numel < region.layout.numel:
                collect(param, result, str(name), state.spec.block_numel)
        return result

    def write(self, region: Region, name: str, param: ShardedParam, values: torch.Tensor) -> None:
        """Sets the parameter's state ``name`` from ``values``, as `read_values` gives them."""
        if name not in region.initialised:
            self.fill(region, name, None)
        for part, position in self._parts(region, name, param, write=True):
            part.copy_(values[position : position + part.numel()])

    def edit(
        self,
        region: Region,
        name: str,
        param: ShardedParam,
        change: Callable[[torch.Tensor], object],
    ) -> None:
        """Applies ``change`` to the parameter's state ``name``, piece by piece."""
        for part, _ in self._parts(region, name, param, write=True):
            change(part)

    def rebuild_master(self, param: ShardedParam) -> None:
        """Makes a parameter, whose values are in its group's lease, its own master."""
        region = param.region
        name = region.master
        if name is None or name not in region.initialised:
            return
        values = param.values
        for part, position in self._parts(region, name, param, write=True):
            if name == Field.MASTER:
                part.copy_(values[position : position + part.numel()])
            else:
                part.zero_()

    def fill(self, region: Region, name: str, values: torch.Tensor | None) -> None:
        """Writes all of a state: what this rank owns of ``values``, which has an element for each one
        of the region, or zeros."""
        state = region.states[name]
        mine = None if values is None else values[region.owned.start : region.owned.stop]
        if state.record.host_only:
            address = state.store.view_address(state.record)
            _fill(tensor_over(address, state.record.nbytes)[0].view(state.dtype), mine, 0)
            state.store.mark_written(state.record)
        else:
            room = self._pipeline.borrow()
            step = room.numel() // ALIGNMENT * ALIGNMENT
            for start in range(0, state.record.nbytes, step):
                stop = min(start + step, state.record.nbytes)
                here = room[: stop - start].view(state.dtype)
                _fill(here, mine, start // state.dtype.itemsize)
                state.store.write(state.record, start, stop, room.data_ptr(), owner=room).wait()
        region.initialised.add(name)

    def _parts(
        self, region: Region, name: str, param: ShardedParam, *, write: bool
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Views of the parameter's state, as far as this rank owns it, with their first element's
        number; with ``write`` each is written back after the caller is done with it."""
        self._pipeline.quiesce()
        state, segment = region.states[name], param.segment
        mine = region.owned.meet(segment.start, segment.stop)
        if not mine.numel:
            return
        skipped = state.spec.count(mine.start - segment.start)
        first = state.spec.nbytes(mine.start - region.owned.start)
        last = state.spec.nbytes(mine.stop - region.owned.start)
        if state.record.host_only:
            address = state.store.view_address(state.record) + first
            yield tensor_over(address, last - first)[0].view(state.dtype), skipped
            return
        for part, position in self._streamed(state, first, last, write=write):
            yield part, skipped + position

    def _streamed(
        self, state: StateRecord, first: int, last: int, *, write: bool
    ) -> Iterator[tuple[torch.Tensor, int]]:
        room = self._pipeline.borrow()
        step = room.numel() // ALIGNMENT * ALIGNMENT
        for start in range(first // ALIGNMENT * ALIGNMENT, last, step):
            stop = min(start + step, round_up(last), state.record.nbytes)
            try:
                state.store.read(state.record, start, stop, room.data_ptr(), owner=room).wait()
            except StateError:
                state.store.raise_failed()
                raise
            a, b = max(first, start), min(last, stop)
            yield room[a - start : b - start].view(state.dtype), (a - first) // state.dtype.itemsize
            if write:
                state.store.write(state.record, start, stop, room.data_ptr(), owner=room).wait()


def _fill(destination: torch.Tensor, values: torch.Tensor | None, first: int) -> None:
    """``values`` from the ``first`` on, and zeros after the last."""
    destination.zero_()
    if values is not None:
        part = values[first : first + destination.numel()]
        destination[: part.numel()].copy_(part)


def collect(param: ShardedParam, values: torch.Tensor, what: str, block_numel: int = 1) -> None:
    """Fills in, from the ranks that own them, what is not this rank's of ``values``, one for each block
    of ``block_numel`` elements of ``param`` in memory order. All ranks call it, for the same
    ``what``."""
    group, segment = param.group, param.segment
    group.runtime.gather.shares.start_owed()
    comm = group.sharing.comm
    region = param.region
    parts = []
    for rank in range(comm.size):
        theirs = region.layout.shard(rank, comm.size).meet(segment.start, segment.stop)
        first = (theirs.start - segment.start) // block_numel
        parts.append(values[first : first - (-theirs.numel // block_numel)])
    mine = parts[comm.rank]
    # Another message for everything that may be read: ranks that read in another order disagree.
    number = zlib.crc32(f"{what} {param.name} {group.updates}".encode()) & MAX_INDEX
    message = Message(Kind.WHOLE, number, f"{param.name} ({what})", group.updates)
    comm.exchange(message, [mine] * comm.size, parts).wait()
