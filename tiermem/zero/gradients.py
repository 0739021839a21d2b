"""Gradients between backward and update.

[Note: gradients] As each parameter's gradient is accumulated by autograd it is copied into one
flat buffer per group (elements as in the group's trainable regions, one after another) while it is
warm in cache; the same pass sums its squares for the global norm. Then torch's tensor is dropped.
Buffers of groups that the plan keeps stay in host memory; the others are staged and, when the
group's backward is done, written to its gradient record. A first gradient is kept in the
parameter's own precision; a second micro-step turns the buffer into fp32 and adds there, so sums
do not depend on how many bytes the first one took. With ``gradient_accumulation_dtype: "param"`` it
stays as it is, and each sum is rounded to it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tiermem.errors import BudgetError, StateError, TierIOError
from tiermem.io.base import Priority
from tiermem.kernels import Kernels
from tiermem.memory.arena import Arena, Block
from tiermem.memory.lease import tensor_over
from tiermem.store.records import RecordSpec
from tiermem.store.store import TieredStore
from tiermem.types import Field, Purpose, Tier, format_bytes, round_up
from tiermem.zero.group_gradient import GroupGradient, flatten_like, gradient_bytes
from tiermem.zero.layout import Span

if TYPE_CHECKING:
    from tiermem.zero.group import ParamGroup
    from tiermem.zero.param import ShardedParam


logger = logging.getLogger(__name__)


class GradientStore:
    """Keeps and spills gradients; see [Note: gradients]. Training thread only, but for
    `give_back`, which the optimizer worker calls."""

    def __init__(self, store: TieredStore, arena: Arena, kernels: Kernels) -> None:
        self._store = store
        self._arena = arena
        self._kernels = kernels
        self.adds_in_fp32 = True
        self.start_wide = False  # several micro-steps are declared
        self.spills = True  # gradients are kept until a deferred update
        self.may_widen = True  # one micro-step is not declared
        self._holding: dict[GroupGradient, None] = {}  # of staging buffers
        self._kept_free: dict[tuple[ParamGroup, bool], Block] = {}
        self._staging: deque[Block] = deque()
        self._spilling: deque[GroupGradient] = deque()
        self.stall_seconds = 0.0
        self.changes = 0  # counts whatever may change a norm; alike on all ranks
        self._lock = threading.Lock()  # the worker gives buffers back too
        self.wait_for_release: Callable[[], bool] = lambda: False

    def release_staging(self) -> None:
        """Gives idle staging buffers back, for another division of the budget."""
        for own in list(self._spilling):
            self._settle_spill(own)
        while self._staging:
            self._arena.free(self._staging.popleft())

    def add_staging(self, count: int, nbytes: int) -> None:
        """Makes ``count`` staging buffers of ``nbytes`` bytes each."""
        for _ in range(count):
            self._staging.append(self._allocate(nbytes, "staging gradients"))

    def reserve(self, group: ParamGroup) -> None:
        """Takes the memory of a gradient buffer that ``group`` keeps for itself."""
        key = (group, self.start_wide)
        nbytes = gradient_bytes(group, self.start_wide)
        if key not in self._kept_free:
            self._kept_free[key] = self._allocate(nbytes, f"the gradients of {group.name!r}")

    def forget_buffers(self, group: ParamGroup) -> None:
        """The gradients of ``group`` will have another size: gives its own buffers back."""
        for wide in (False, True):
            block = self._kept_free.pop((group, wide), None)
            if block is not None:
                self._arena.free(block)
        group.gradient_record = None

    def _allocate(self, nbytes: int, what: str) -> Block:
        block = self._arena.allocate(nbytes, Purpose.GRADIENT)
        if block is None:
            raise BudgetError(
                f"{what} need {format_bytes(nbytes)} of host memory, "
                f"{format_bytes(self._arena.free_bytes)} are free "
                f"({format_bytes(self._arena.largest_free)} in one piece). Remedy: raise host_memory, "
                f"or declare gradient_accumulation_steps so that they are planned for"
            )
        return block

    # ---- accumulation

    def accumulate(self, param: ShardedParam, gradient: torch.Tensor) -> None:
        """Adds one parameter's gradient (its shape, any dtype)."""
        group = param.group
        flat = flatten_like(gradient, param.segment.spec.stride)
        own = self.open(group)
        again = param.index in own.present
        if again and self._must_widen(own, {param.index}):
            self._widen(own)
        destination = own.param_view(param)
        if destination.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise StateError(
                f"{param.name!r} has dtype {destination.dtype}; trainable parameters are float32, "
                f"bfloat16 or float16. Remedy: compute_dtype: 'bf16', 'fp16' or 'fp32'"
            )
        if flat.device.type != "cpu":
            flat = flat.cpu()
        held = own.held(param)
        flat = flat[held.start : held.stop]
        self._note_squares(own, param, held, self._kernels.reduce(destination, (flat,), 1.0, add=again))
        own.present.add(param.index)
        self.sum_squares_of(param)

    def _must_widen(self, own: GroupGradient, again: set[int]) -> bool:
        """Whether the gradients ``again``, which are there, can take more only in fp32."""
        params = (own.group.params[index] for index in again)
        return (
            self.adds_in_fp32 and not own.widened and any(p.spec.dtype != torch.float32 for p in params)
        )

    def open(self, group: ParamGroup) -> GroupGradient:
        """The group's gradients, in memory, to be changed."""
        self.changes += 1
        if group.gradient is None:
            if group.pending is not None:  # not used since: its gradients may lie where these will go
                group.runtime.gather.apply_pending([group])
            group.gradient = GroupGradient(group, widened=self.start_wide)
        self.bring_in(group.gradient)
        if group.gradient.scale != 1.0:
            self._apply_scale(group.gradient)
        return group.gradient

    def open_for_sums(self, group: ParamGroup, partial: GroupGradient) -> set[int]:
        """Makes the group's gradients ready to take the sums over all ranks of ``partial``; which
        parameters had some before."""
        own = self.open(group)
        before = set(own.present)
        sums = partial.widened and not own.widened  # of several backwards, in fp32
        if sums or self._must_widen(own, before & partial.present):
            self._widen(own)
        own.present |= partial.present
        own.summing = True
        return before

    def add_parts(
        self, param: ShardedParam, span: Span, parts: Sequence[torch.Tensor], *, add: bool
    ) -> None:
        """Adds the mean of ``parts``, summed in this order, to the elements ``span`` of the parameter's
        region, or (not ``add``) puts it there; after `open_for_sums`."""
        own = param.group.gradient
        assert own is not None
        if span.numel:
            region = param.region
            first = own.span(region).start
            destination = own.region_view(region)[span.start - first : span.stop - first]
            squares = self._kernels.reduce(destination, parts, 1 / len(parts), add=add)
            within = Span(span.start - param.segment.start, span.stop - param.segment.start)
            self._note_squares(own, param, within, squares)

    def _note_squares(
        self, own: GroupGradient, param: ShardedParam, span: Span, squares: float
    ) -> None:
        """``squares`` are those of the elements ``span`` of the parameter. They count if that is all
        that this rank reduces of it; else `sum_squares_of` has to look again."""
        own.sum_squares[param.index] = squares if span == param.reduced else math.nan

    def sum_squares_of(self, param: ShardedParam) -> None:
        """Sums the squares of what this rank reduces of the parameter, where that came in several
        pieces, or with what other ranks reduce: the order of the sum must not depend on it."""
        own, mine = param.group.gradient, param.reduced
        assert own is not None
        if not mine.numel:
            own.sum_squares[param.index] = 0.0
        elif math.isnan(own.sum_squares[param.index]):
            region = param.region
            first = param.segment.start - own.span(region).start
            view = own.region_view(region)[first + mine.start : first + mine.stop]
            own.sum_squares[param.index] = self._kernels.accumulate(view, view, add=False)

    def _apply_scale(self, own: GroupGradient) -> None:
        """More is to be added to gradients that were clipped: they are scaled now."""
        scale, own.scale = own.scale, 1.0
        for index in sorted(own.present):
            param = own.group.params[index]
            view = own.param_view(param)
            squares = self._kernels.accumulate(view, view * scale, add=False)
            self._note_squares(own, param, own.held(param), squares)
            self.sum_squares_of(param)

    def replace(self, param: ShardedParam, value: torch.Tensor | None) -> None:
        """``param.grad = value``."""
        own = param.group.gradient
        if value is not None:
            if value.shape != param.shape:
                raise StateError(
                    f"a gradient of shape {tuple(value.shape)} does not fit {param.name!r} "
                    f"{tuple(param.shape)}"
                )
            value = param.part_of(value.detach())
            if own is not None:
                own.present.discard(param.index)
            self.accumulate(param, value)
            self.park(param.group)
        elif own is not None and param.index in own.present:
            self.changes += 1
            own.present.discard(param.index)
            own.sum_squares.pop(param.index, None)
            if not own.present:
                self.discard(param.group)

    def discard(self, group: ParamGroup) -> None:
        """Forgets the gradients of ``group``."""
        own, group.gradient = group.gradient, None
        if own is None:
            return
        self.changes += 1
        self.give_back(own)
        try:
            self._settle_spill(own)
        except TierIOError as error:  # nobody needs what could not be written
            logger.warning("discarded gradients of %r: %s", group.name, error)

    def bring_in(self, own: GroupGradient) -> None:
        """The buffer in memory: allocated at the first gradient, read back if it was spilled."""
        self._settle_spill(own, keep=True)
        if own.tensor is not None:
            return
        self._place(own)
        if not own.present:
            return
        assert own.group.gradient_record is not None
        assert own.block is not None
        try:
            self._store.read(
                own.group.gradient_record,
                0,
                own.nbytes,
                own.block.address,
                owner=own.tensor,
                priority=Priority.DEMAND,
            ).wait()
        except BaseException:
            self._release_block(own)
            raise

    def _settle_spill(self, own: GroupGradient, *, keep: bool = False) -> None:
        """Waits for the spill of ``own`` and, unless ``keep``, lets its buffer serve the next.

        A buffer that an update reads (``pinned``) stays until the update gives it back. If the spill
        failed the buffer stays too, for it is then the only copy; the error is raised.
        """
        transfer = own.transfer
        if transfer is None:
            return
        try:
            transfer.complete()
            if not transfer.reported:
                transfer.wait()
        finally:
            if own in self._spilling:
                self._spilling.remove(own)
            with self._lock:
                own.transfer = None
                release = own.used or (transfer.error is None and not keep and not own.pinned)
            if transfer.error is not None:  # the next spill gets another place
                own.group.gradient_record = None
            if release:
                self._release_block(own)

    def _place(self, own: GroupGradient) -> None:
        nbytes = own.nbytes
        if not own.group.stages_gradients:
            block = self._kept_free.pop((own.group, own.widened), None) or self._allocate(
                nbytes, f"the gradients of {own.group.name!r}"
            )
            own.staged = False
        else:
            block = self._take_staging(nbytes)
            own.staged = True
            self._holding[own] = None
        assert block.nbytes >= nbytes
        own.block = block
        own.tensor, _ = tensor_over(block.address, round_up(nbytes))

    def _take_staging(self, nbytes: int) -> Block:
        """A staging buffer: a free one, or the one that comes back first."""
        if not self._staging:
            started = time.perf_counter()
            try:
                self._await_staging()
            finally:
                self.stall_seconds += time.perf_counter() - started
        block = self._staging.popleft()
        if block.nbytes < nbytes:
            self._staging.appendleft(block)
            raise BudgetError(
                f"a gradient buffer of {format_bytes(nbytes)} is larger than the planned "
                f"{format_bytes(block.nbytes)}. Remedy: construct the optimizer before the first "
                f"backward and do not declare gradient_accumulation_steps: 1 when accumulating"
            )
        return block

    def _await_staging(self) -> None:
        while not self._staging:
            if self._spilling:
                self._settle_spill(self._spilling[0])
            elif not (
                self.wait_for_release()
                or self._staging
                or self._spill_unfinished()
                or self._one_more_staging()
            ):
                raise BudgetError(
                    "all staging buffers for gradients are held by groups that are being accumulated. "
                    "Remedy: raise host_memory, or wrap larger modules"
                )

    def _spill_unfinished(self) -> bool:
        """Frees a staging buffer of a group whose backward goes on (parallel branches)."""
        for own in self._holding if self._store.num_paths else ():
            idle = own.transfer is None and not own.summing
            if own.group.gradient is own and own.present and idle:
                self.add_record(own.group)
                self.park(own.group)
                return True
        return False

    def _one_more_staging(self) -> bool:
        """Another staging buffer, if host memory that nothing else was planned for is left."""
        block = self._arena.allocate(max(own.nbytes for own in self._holding), Purpose.GRADIENT)
        if block is not None:
            self._staging.append(block)
        return block is not None

    def add_record(self, group: ParamGroup) -> None:
        """Room on NVMe for the gradients of ``group``, fp32 where several micro-steps may come."""
        if group.gradient_record is None:
            nbytes = gradient_bytes(group, self.may_widen)
            group.gradient_record = self._store.add(
                RecordSpec(group.name, Field.GRAD, nbytes, Tier.NVME)
            )

    def _widen(self, own: GroupGradient) -> None:
        """Turns the buffer into fp32, exactly; see [Note: gradients]."""
        narrow = {
            index: own.param_view(own.group.params[index]).clone() for index in sorted(own.present)
        }
        if own.staged:
            own.widened = True
            if own.block is None or own.block.nbytes < own.nbytes:
                own.widened = False
                raise BudgetError(
                    "gradient_accumulation_steps: 1 was declared, but a second micro-step adds to "
                    f"the gradients of {own.group.name!r}. Remedy: declare the real number"
                )
            own.tensor, _ = tensor_over(own.block.address, round_up(own.nbytes))
            record = own.group.gradient_record
            if record is not None and record.nbytes < own.nbytes:  # planned for one micro-step
                self.may_widen, own.group.gradient_record = True, None
                self.add_record(own.group)
        else:
            old = own.block
            own.widened, own.block, own.tensor = True, None, None
            self._place(own)
            if old is not None:
                self._kept_free[own.group, False] = old
        for index, values in narrow.items():
            self._kernels.accumulate(own.param_view(own.group.params[index]), values, add=False)

    # ---- after a group's backward

    def park(self, group: ParamGroup) -> None:
        """Group's backward is done: staged gradients that are kept for later go to NVMe."""
        own = group.gradient
        if own is None or not own.staged or own.tensor is None or own.transfer is not None:
            return
        if group.gradient_record is None:
            if not self.spills:  # updated inside backward or at step()
                return
            self.add_record(group)
        assert group.gradient_record is not None
        assert own.block is not None
        own.transfer = self._store.write(
            group.gradient_record, 0, own.nbytes, own.block.address, owner=own.tensor
        )
        self._spilling.append(own)

    def reap(self) -> None:
        """Settles spills that are over. Raises the error of one that failed."""
        for own in list(self._spilling):
            if own.transfer is not None and own.transfer.done():
                self._settle_spill(own)

    def _release_block(self, own: GroupGradient) -> None:
        with self._lock:
            block, own.block, own.tensor = own.block, None, None
            self._holding.pop(own, None)
        if block is None:
            return
        if own.staged:
            self._staging.append(block)
        else:
            self._kept_free[own.group, own.widened] = block

    def pin(self, own: GroupGradient) -> None:
        """An update starts: gradients that are in memory stay there until `give_back`."""
        own.pinned = own.tensor is not None

    def give_back(self, own: GroupGradient) -> None:
        """The gradients were used or discarded; the buffer serves the next, once its spill is over."""
        with self._lock:
            own.used = True
            spilling = own.transfer is not None
        if not spilling:
            self._release_block(own)

    def close(self) -> None:
        """Frees every buffer. Raises the first failed spill, after all is done."""
        errors: list[Exception] = []
        for own in list(self._spilling):
            try:
                self._settle_spill(own)
            except Exception as error:
                errors.append(error)
        for own in list(self._holding):
            self._release_block(own)
        for block in [*self._staging, *self._kept_free.values()]:
            self._arena.free(block)
        self._staging.clear()
        self._kept_free.clear()
        if errors:
            raise errors[0]
