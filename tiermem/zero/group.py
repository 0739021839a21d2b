"""`ParamGroup`: the unit of gather.

[Note: swapping] While a group is sharded, each module slot that held one of its parameters holds
the `Placeholder`, and the real parameter's data is a one-element NaN tensor expanded to the true
shape (never ``empty(0)``: accumulation, autocast and direct sub-module calls then see true
shapes). While it is unsharded, the slot holds the real parameter whose data is a view of the
lease. A slot is written only where it holds what we put there; a foreign tensor is left alone, so
that ``torch.func.functional_call`` is exact. A function that is called on a placeholder by itself
gets the real parameter, and only that one becomes a view of the lease, for the call; no slot changes,
and the group stays GATHERING (`ForwardTracker.faulted_call`).

[Note: lost writes] The lease is the truth while the group holds it. Writes by the user bump the
real parameter's version counter (views share it), so comparing versions before the lease is
dropped finds them all; see `GatherScheduler.settle`.

[Note: whole leases] Over several ranks a lease first holds this rank's shard only: it is read, or
updated, there in place, and then exchanged for those of the other ranks. ``whole`` says that all of it
is current; only then may anybody compute with it.

[Note: turns] Every message about a group tells how often the group has been updated, and the parity of
that is part of its tag. So a rank that alone asks for a group before a step, say to print a parameter,
and the others, who next need the group after the step, never take each other's shards of two different
steps for one: the ranks are found to disagree.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tiermem.comm import Communicator, Kind, Message
from tiermem.errors import StateError
from tiermem.memory.lease import Lease
from tiermem.store.records import Record
from tiermem.types import Field
from tiermem.zero.layout import GroupLayout, RegionLayout, Span
from tiermem.zero.param import ShardedParam, absent
from tiermem.zero.sharing import Exchanges, Sharing

if TYPE_CHECKING:
    from tiermem.store.store import TieredStore
    from tiermem.store.transfer import Transfer
    from tiermem.zero.group_gradient import GroupGradient
    from tiermem.zero.rule import StateSpec
    from tiermem.zero.runtime import Runtime
    from tiermem.zero.update import PendingUpdate, UpdateJob


class ShardedState(enum.Enum):
    """Where a group's parameters are. Owned by the training thread."""

    SHARDED = "sharded"  # no lease
    GATHERING = "gathering"  # a lease; its transfer or update may still run; not in any slot
    UNSHARDED = "unsharded"  # real parameters over the lease, in their slots


_ALLOWED = {
    (ShardedState.SHARDED, ShardedState.GATHERING),
    (ShardedState.GATHERING, ShardedState.UNSHARDED),
    (ShardedState.UNSHARDED, ShardedState.GATHERING),
    (ShardedState.GATHERING, ShardedState.SHARDED),
}


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One optimizer state of a region: its record, the store that holds it, what its values are."""

    record: Record
    store: TieredStore
    spec: StateSpec

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype


@dataclass(slots=True)
class Region:
    """A region of a group with its optimizer states. ``initialised`` names those that have values:
    before that a state is zero and is not read. ``trainable`` may become True later. ``shard`` and
    ``owned``: see `Sharing`; states and gradients hold the owned elements, from its start on.
    ``number`` tells the runtime's regions apart in messages."""

    layout: RegionLayout
    trainable: bool
    shard: Span
    owned: Span
    number: int
    states: dict[str, StateRecord] = field(default_factory=dict)
    initialised: set[str] = field(default_factory=set)

    @property
    def master(self) -> Field | None:
        """The state that keeps the fp32 masters; None if the parameters have none."""
        return next((f for f in (Field.MASTER_LO, Field.MASTER) if f in self.states), None)


@dataclass(frozen=True, slots=True)
class GroupTraits:
    """How a group is kept. ``persistent``: it never leaves the device; ``small``: its parameters are
    below the persistence threshold; ``anchored``: its unit encloses others, which are used while it
    is, so it keeps its lease, to leave one hole."""

    persistent: bool
    small: bool
    anchored: bool


class Transfers:
    """The transfers of one group's parts, as one."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Waits for all of them, then raises the first error."""
        for part in self._parts:
            part.complete()
        for part in self._parts:
            part.wait()


class ParamGroup:
    """See the module's notes. ``record`` is None where the parameters live on the device."""

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        name: str,
        layout: GroupLayout,
        sharing: Sharing,
        traits: GroupTraits,
    ) -> None:
        self.runtime = runtime
        self.index = index
        self.name = name
        self.layout = layout
        self.sharing = sharing
        self.persistent = traits.persistent
        self.anchored = traits.anchored
        self.small = traits.small
        self.regions = [
            Region(
                region,
                region.trainable,
                sharing.shard(region),
                sharing.owned(region),
                runtime.next_region_number(),
            )
            for region in layout.regions
        ]
        self.record_parts = sharing.record_parts(layout)
        self.params: list[ShardedParam] = []
        self.record: Record | None = None
        self.gradient_record: Record | None = None
        self.stages_gradients = False  # in a shared buffer, not one of the group's own
        # Training thread:
        self.state = ShardedState.SHARDED
        self.lease: Lease | None = None
        self.transfer: Transfers | None = None
        self.whole = False  # see [Note: whole leases]
        self.exchange: Exchanges | None = None  # of parameters, with all others; may be over
        self.under_way = False  # ``exchange`` is for the present values
        self.ahead = False  # committed or fetched, and not used since
        self.owed = False  # an update was frozen, and the group not used since
        self.leaving = False  # updated inside backward; gives its lease up when that is done
        self.pending: PendingUpdate | None = None
        self.job: UpdateJob | None = None
        self.gradient: GroupGradient | None = None
        self.partial: GroupGradient | None = None  # this rank's, not reduced over the ranks yet
        self.unsettled = 0  # open `GatheredParameters` blocks; until their end no write counts
        self.uses = 0  # forwards, faulted calls and gathered() blocks that need it now
        self.handle_token = object()  # referred to by every saved handle; see `handles`
        self.version = 0  # of the values; saved handles must agree
        self.across: tuple[Communicator, ...] = ()  # for each dimension the model is split over
        self.updates = 0  # alike on all ranks; see [Note: turns]
        self.written: dict[ShardedParam, None] = {}  # by the user, and not in the store yet

    def __repr__(self) -> str:
        return f"ParamGroup({self.name!r}, {self.state.value}, {self.layout.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def numel(self) -> int:
        """Elements of all its parameters, padding left out."""
        return sum(segment.numel for segment in self.layout.segments)

    @property
    def unsharded(self) -> bool:
        """Whether its real parameters are in their slots."""
        return self.state is ShardedState.UNSHARDED

    @property
    def sharded(self) -> bool:
        """Whether its parameters come from several ranks at each gather."""
        return self.sharing.sharded

    @property
    def record_bytes(self) -> int:
        """Bytes of parameters that this rank keeps between uses."""
        return sum(part.nbytes for part in self.record_parts)

    def record_offset(self, region: Region, element: int) -> int:
        """Where ``element`` of ``region`` lies in the group's record (bytes)."""
        if not self.sharded:
            return region.layout.byte_offset + element * region.layout.dtype.itemsize
        part = self.record_parts[region.layout.index]
        return part.record_offset + (element - region.shard.start) * region.layout.dtype.itemsize

    @property
    def handles(self) -> int:
        """Saved tensors that will need the group in backward. Counted by references, since a
        ``__del__`` would swallow the Ctrl-C that falls into it."""
        return sys.getrefcount(self.handle_token) - 2  # the attribute's and the argument's

    @property
    def trainable_numel(self) -> int:
        """Elements whose gradients this rank keeps, with padding."""
        return sum(r.owned.numel for r in self.regions if r.trainable)

    def message(self, kind: Kind, region: Region) -> Message:
        """What an exchange about ``region`` is called now; see [Note: turns]."""
        return Message(kind, 2 * region.number + self.updates % 2, self.name, self.updates)

    def move(self, to: ShardedState) -> None:
        """The one place where ``state`` changes."""
        if (self.state, to) not in _ALLOWED:
            raise StateError(f"group {self.name!r} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def region_view(self, region: Region) -> torch.Tensor:
        """The region's elements in the lease, 1-D."""
        assert self.lease is not None
        layout = region.layout
        return self.lease.typed(layout.dtype, layout.byte_offset, layout.numel)

    def attach(self, params: Sequence[ShardedParam] | None = None) -> None:
        """Real parameters, all or these, become views of the lease."""
        assert self.lease is not None
        with torch.inference_mode(False), torch.no_grad():
            views = [self.region_view(region) for region in self.regions]
            for param in self.params if params is None else params:
                segment = param.segment
                spec = segment.spec
                param.inner.data = views[segment.region].as_strided(
                    spec.shape, spec.stride, views[segment.region].storage_offset() + segment.start
                )

    def detach(
        self, params: Sequence[ShardedParam] | None = None, *, from_dead_code: bool = False
    ) -> bool:
        """Real parameters, all or these, give up the lease; False if some are held (see [Note: held
        parameters]) and have to give it up later. With ``from_dead_code`` tracebacks do not hold."""
        complete = True
        with torch.inference_mode(False), torch.no_grad():
            for param in self.params if params is None else params:
                if param.held and not (from_dead_code and param.held_by_dead_code):
                    complete = False
                else:
                    param.inner.data = absent(param.spec, param.inner.device)
        return complete

    def adopt_replaced(self) -> list[ShardedParam]:
        """Values of real parameters whose ``.data`` was replaced go to the lease; these parameters.
        Raises `StateError` if they do not fit."""
        replaced = []
        for param in self.params:
            real, view = param.inner, param.values
            if real.data_ptr() == view.data_ptr():
                continue
            if real.shape != param.spec.shape or real.dtype != param.spec.dtype:
                raise StateError(
                    f"the data of {param.name!r} were replaced by others of shape {tuple(real.shape)} "
                    f"and {real.dtype}; a sharded parameter stays {tuple(param.spec.shape)}, "
                    f"{param.spec.dtype}"
                )
            view.as_strided(param.spec.shape, param.spec.stride).copy_(real)
            replaced.append(param)
        if replaced:
            self.attach()
        return replaced

    def swap_in(self) -> None:
        self.attach()
        for param in self.params:
            for slot in param.slots:
                slot.put(param.real, param.placeholder)
        self.move(ShardedState.UNSHARDED)

    def swap_out(self) -> None:
        for param in self.params:
            for slot in param.slots:
                slot.put(param.placeholder, param.real)
        if not self.detach():
            self.runtime.gather.room.lingering.add(self)
        self.move(ShardedState.GATHERING)

    def mark_clean(self) -> None:
        """The store agrees with the lease."""
        self.written.clear()
        for param in self.params:
            param.version = param.written

    def note_writes(self) -> None:
        """Notices what the user has written since the last look; see [Note: lost writes]."""
        changed = [param for param in self.params if param.written != param.version]
        if changed:
            self.version += 1
            self.written.update(dict.fromkeys(changed))
            for param in changed:
                param.version = param.written
