"""Filling new groups: from the model's own tensors, or from the meta device by initialising.

[Note: initialisation] A meta parameter is materialised on the CPU in its original dtype, its module
is initialised, and the values go to the group's buffer (fp32 values in 16-bit groups go to the
master too, which is exact); then the next module follows. So at most one module's
parameters exist in full precision at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tiermem.comm import Kind
from tiermem.errors import StateError
from tiermem.memory.arena import Block
from tiermem.memory.lease import tensor_over
from tiermem.memory.trim import return_freed_memory
from tiermem.types import Field, Purpose, round_up
from tiermem.zero import compat
from tiermem.zero.group import ParamGroup, Region
from tiermem.zero.group_gradient import flatten_like
from tiermem.zero.masters import master_state, store_master
from tiermem.zero.param import ShardedParam, absent
from tiermem.zero.placeholder import Placeholder
from tiermem.zero.runtime import Runtime
from tiermem.zero.split import Split
from tiermem.zero.wrap import PlannedUnit

Init = Callable[[nn.Module, str], None]


def find_initialiser(model: nn.Module, init: Init | None, names: dict[nn.Module, str]) -> Init:
    """What initialises one module. Raises `StateError` if some module cannot be."""
    if init is not None:
        return init
    stuck = [
        name or type(module).__name__
        for module, name in names.items()
        if _on_meta(module) and _reset_method(module) is None
    ]
    if stuck:
        raise StateError(
            f"modules on the meta device without reset_parameters(): {', '.join(stuck[:5])}"
            f"{' and others' if len(stuck) > 5 else ''}. Remedy: tiermem.shard(..., init=function) "
            f"with a function that fills a module's parameters and buffers"
        )
    return _reset


def _reset(module: nn.Module, _: str) -> None:
    method = _reset_method(module)
    assert method is not None
    method()


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None


def _on_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(t is not None and t.device.type == "meta" for t in own)


class _MetaBuffers:
    """A module's buffers on their way from the meta device. They come filled with a pattern, so
    that one which the initialiser left alone is refused and not trained with."""

    _PATTERN = 0xA5  # no boolean, and -2.9e-16 in fp32

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._made: dict[str, tuple[torch.Tensor, int]] = {}  # with the version after filling
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                made = _room(buffer)
                _bytes_of(made).fill_(self._PATTERN)
                module._buffers[key] = made
                self._made[key] = made, made._version

    def check(self, name: str) -> None:
        """Raises `StateError` that names every buffer of the module ``name`` that nothing wrote."""
        untouched = [
            key
            for key, (made, version) in self._made.items()
            if self._module._buffers.get(key) is made
            # A value that happens to be the pattern was written all the same: torch counted it.
            and made._version == version
            and made.numel()
            and bool((_bytes_of(made) == self._PATTERN).all())
        ]
        if untouched:
            kind = type(self._module).__name__
            raise StateError(
                f"buffers of {name or 'the model'!r} ({kind}) on the meta device were not initialised: "
                f"{', '.join(untouched)}. Remedy: fill them in {kind}.reset_parameters(), or "
                f"tiermem.shard(..., init=function) with a function that does; then build the model "
                f"again, a part of it is sharded already"
            )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage; writes through them do not count as writes to it."""
    storage = compat.local_tensor(tensor).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def materialise_buffers(
    model: nn.Module, names: dict[nn.Module, str], initialise: Init, device: torch.device
) -> None:
    """Meta buffers of modules that own no meta parameter, and buffers' way to the device."""
    for module, name in names.items():
        if any(b is not None and b.device.type == "meta" for b in module._buffers.values()):
            with torch.inference_mode(False), torch.no_grad():
                buffers = _MetaBuffers(module)
                initialise(module, name)
                buffers.check(name)
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and device.type != "cpu":
                module._buffers[key] = buffer.to(device)


class Filler:
    """Moves the parameters of one unit into its groups. See [Note: initialisation]."""

    def __init__(
        self,
        runtime: Runtime,
        unit: PlannedUnit,
        groups: list[ParamGroup],
        names: dict[nn.Module, str],
        initialise: Init,
        images: dict[ParamGroup, torch.Tensor],
    ) -> None:
        self._runtime = runtime
        self._unit = unit
        self._groups = groups
        self._names = names
        self._initialise = initialise
        self._images = images
        self._masters: dict[tuple[ParamGroup, int], torch.Tensor] = {}
        self._blocks: list[Block] = []
        by_name = {
            segment.spec.name: (group, index)
            for group in groups
            for index, segment in enumerate(group.layout.segments)
        }
        self._place = {id(p.param): by_name[p.name] for p in unit.params}
        self._reals: dict[int, nn.Parameter] = {}

    def fill(self) -> None:
        try:
            for group in self._groups:
                if group not in self._images:
                    with self._runtime.interrupts:
                        self._images[group] = self._runtime.gather.open_for_fill(group)
            for planned in self._unit.params:
                if id(planned.param) in self._reals:
                    continue
                if planned.param.device.type == "meta":
                    self._from_meta(planned.slots[0].module)
                else:
                    self._store(planned.param, planned.part.detach())
                    self._reals[id(planned.param)] = planned.param
            with self._runtime.interrupts:
                self._adopt()
                self._reals.clear()
                self._agree()
                for group in self._groups:
                    self._runtime.gather.close_fill(group, self._images.pop(group))
                self._write_masters()
        finally:
            self._masters.clear()
            for block in self._blocks:
                self._runtime.host.free(block)
            return_freed_memory()

    def _from_meta(self, module: nn.Module) -> None:
        """Materialises, initialises and stores what ``module`` names on the meta device."""
        own = {k: p for k, p in module._parameters.items() if p is not None}
        with torch.inference_mode(False):
            for key, param in own.items():
                if param.device.type == "meta" or isinstance(param, Placeholder):
                    # A placeholder is a tied parameter of an earlier unit: it keeps the values
                    # that its first module gave it, this one initialises a scratch tensor.
                    setattr(module, key, nn.Parameter(_room(param), requires_grad=param.requires_grad))
            with torch.no_grad():
                buffers = _MetaBuffers(module)
                self._initialise(module, self._names[module])
                buffers.check(self._names[module])
        for key, param in own.items():
            made = module._parameters[key]
            if id(param) in self._place and id(param) not in self._reals:
                assert made is not None
                self._store(param, compat.local_tensor(made).detach())
                self._reals[id(param)] = made
            elif made is not param:  # tied, and initialised by another module
                module._parameters[key] = self._reals.get(id(param), param)

    def _store(self, param: nn.Parameter, source: torch.Tensor) -> None:
        """One parameter's values into its group's image (and its master)."""
        group, index = self._place[id(param)]
        segment = group.layout.segments[index]
        region = group.regions[segment.region]
        layout = region.layout
        flat = flatten_like(source, segment.spec.stride).to("cpu")
        first = layout.byte_offset + segment.start * layout.dtype.itemsize
        stop = first + segment.numel * layout.dtype.itemsize
        target = self._images[group][first:stop].view(layout.dtype)
        kept = master_state(layout.dtype, self._runtime.config)
        if kept is None or (kept[0] is Field.MASTER_LO and flat.dtype != torch.float32):
            target.copy_(flat)
            return
        if region.master is None:  # frozen; its values are rounded as if it were not
            state = torch.empty(flat.numel(), dtype=kept[1])
        else:
            state = self._master(group, region)[segment.start : segment.stop]
        store_master(self._runtime.kernels, flat, target, state)

    def _master(self, group: ParamGroup, region: Region) -> torch.Tensor:
        key = (group, region.layout.index)
        if key not in self._masters:
            assert region.master is not None
            dtype = region.states[region.master].dtype
            nbytes = round_up(region.layout.numel * dtype.itemsize)
            block = self._runtime.host.allocate(nbytes, Purpose.STAGING)
            if block is None:
                raise StateError("host memory is in use; shard models before optimizers are made")
            self._blocks.append(block)
            self._masters[key] = tensor_over(block.address, nbytes)[0].zero_().view(dtype)
        return self._masters[key]

    def _adopt(self) -> None:
        """Real parameters give up their own data; placeholders take their slots."""
        by_name = {p.name: p for p in self._unit.params}
        device = self._runtime.device
        for group in self._groups:
            for index, segment in enumerate(group.layout.segments):
                planned = by_name[segment.spec.name]
                real = self._reals[id(planned.param)]
                with torch.inference_mode(False), torch.no_grad():
                    stand_in, split = absent(segment.spec, device), Split.of(real)
                    if split is None:
                        real.data = stand_in
                    else:
                        split.empty(real, stand_in)
                sharded = ShardedParam(group, index, segment.spec.name, real)
                sharded.listen()
                sharded.slots.extend(planned.slots)
                for slot in planned.slots:
                    slot.module._parameters[slot.name] = sharded.placeholder
                group.params.append(sharded)

    def _agree(self) -> None:
        """The first rank's values on all ranks."""
        for group in self._groups:
            comm = group.sharing.comm
            if group.sharing.alone:
                continue
            fields = [
                self._master(group, region) for region in group.regions if region.master is not None
            ]
            for tensor in (self._images[group], *fields):
                comm.share_first(group.message(Kind.SETUP, group.regions[0]), tensor)

    def _write_masters(self) -> None:
        for (group, index), tensor in self._masters.items():
            region = group.regions[index]
            assert region.master is not None
            state = region.states[region.master]
            own = tensor[region.owned.start : region.owned.stop]
            state.store.write(state.record, 0, state.record.nbytes, own.data_ptr(), owner=tensor).wait()
            region.initialised.add(region.master)


def _room(param: torch.Tensor) -> torch.Tensor:
    """Memory on the host for a parameter or buffer that is on the meta device."""
    if isinstance(param, Placeholder):
        shape, stride, split = param._handle.spec.shape, param._handle.spec.stride, param._handle.split
    else:
        part = compat.local_tensor(param)
        shape, stride, split = part.shape, part.stride(), Split.of(param)
    room = torch.empty_strided(shape, stride, dtype=param.dtype)
    return room if split is None else split.wrap(room)
