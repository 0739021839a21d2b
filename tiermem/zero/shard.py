"""`shard`: moves a model's parameters into the tiers, in place, unit by unit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tiermem.comm import Communicator
from tiermem.errors import BudgetError, StateError
from tiermem.schedule.placement import DevicePlan
from tiermem.store.records import Record, RecordSpec
from tiermem.store.store import TieredStore
from tiermem.types import Field, Tier, format_bytes, round_up
from tiermem.zero.agreement import check_alike, share_buffers
from tiermem.zero.forward import Unit
from tiermem.zero.group import GroupTraits, ParamGroup, Region, StateRecord
from tiermem.zero.guards import install_guards
from tiermem.zero.materialize import Filler, Init, find_initialiser, materialise_buffers
from tiermem.zero.plan import PlannedGroup, nvme_bytes, plan_for_shard, plan_groups
from tiermem.zero.rule import StatePlan, StateSpec, adamw_states, master_states
from tiermem.zero.runtime import Runtime
from tiermem.zero.split import Split, check_apart, mesh_of
from tiermem.zero.strays import warn_of_strays
from tiermem.zero.wrap import PlannedUnit, Wrap, plan_units


def shard(
    model: nn.Module,
    runtime: Runtime,
    *,
    wrap: Wrap = None,
    init: Init | None = None,
    mesh: DeviceMesh | None = None,
    model_mesh: DeviceMesh | None = None,
    replicated: Iterable[str] = (),
    states: StatePlan = adamw_states,
) -> nn.Module:
    """Shards ``model`` over the tiers of ``runtime``, in place; returns it.

    Names, ``state_dict`` keys and module classes stay. ``wrap`` lists the modules (or names, or
    classes) to gather as units; by default repeated blocks, then every other module by itself.
    Parameters on the meta device are initialised unit by unit, so that the model never exists
    whole: ``init(module, qualified_name)`` is called for each module that owns some (default:
    its ``reset_parameters()``), and works on ordinary CPU tensors in the parameters' original
    dtype. A parameter that several modules share is initialised by the first.

    Over several ranks (``torch.distributed`` is initialised) all of them call it alike; ``mesh`` is the
    one dimension of a `DeviceMesh` to shard over (default: all ranks). Parameters and buffers take the
    values of its first rank. Raises `StateError` on all ranks if models or configurations differ.

    The model itself may be split over another dimension, by tensor or pipeline parallelism; gradient
    norms, and so clipping and overflow checks, are then those of the whole model. `DTensor` parameters
    (``torch.distributed.tensor.parallel``) tell by themselves: those placed ``Shard`` are split over
    their mesh, all others are the same on its ranks. What is split in another way, ordinary parameters
    over that same mesh too, needs ``model_mesh``, the dimension, and ``replicated``, the names of the
    parameters that are the same on all ranks of it and count once.

    ``states`` says what the optimizer that comes will keep for each parameter, so that budgets are
    planned for it: ``tiermem.optim.SGD.states_of(momentum=0.9)``,
    ``tiermem.optim.Tiered.states_of(torch.optim.Adagrad)``, ... (default: AdamW's).

    Raises `BudgetError` (with the smallest budget that works), `TierIOError` (the paths have no room
    for what is to come), `StateError` and `TypeError` before anything is changed; `StateError` also
    when an initialiser forgets a buffer.
    """
    _check_arguments(model, runtime)
    runtime.check_usable()
    _check_launch()
    units = plan_units(model, wrap)
    split_over = mesh_of((p.name, p.param) for unit in units for p in unit.params)
    check_apart(split_over, group_of(mesh))
    comm = runtime.communicator(group_of(mesh))
    if comm.size > 1 and runtime.device.type != "cpu":
        raise StateError(
            f"{comm.size} ranks on {runtime.device.type} are not supported yet: ranks exchange host "
            f"memory. Remedy: device: 'cpu', or one rank"
        )
    groups = plan_groups(units, runtime.config, comm)
    check_alike(comm, runtime.config, groups, model, 2 * runtime.next_region_number())
    host, device = plan_for_shard(
        groups,
        runtime.config,
        runtime.host.nbytes,
        runtime.host.free_bytes,
        runtime.transfer_groups,
        states,
    )
    if runtime.gather.room.pool is not None:
        _check_beside_others(runtime, device)
    runtime.store.check_room(nvme_bytes(groups, runtime.config, host, states))
    names = {module: name for name, module in model.named_modules()}
    initialise = find_initialiser(model, init, names)
    across = _across(runtime, model, split_over, model_mesh, replicated)
    first = len(runtime.groups)
    made = [
        ParamGroup(
            runtime, first + i, p.name, p.layout, p.sharing, GroupTraits(p.stays, p.small, p.anchored)
        )
        for i, p in enumerate(groups)
    ]
    with runtime.interrupts:
        if runtime.gather.room.pool is None:
            runtime.open_device(device)
        else:
            runtime.extend_device(device)
            if comm.size > 1:  # which leases of earlier models are idle differs from rank to rank
                runtime.gather.vacate()
        for group in made:
            _make_records(runtime, group, host.param_fraction, host.state_fraction)
        runtime.groups.extend(made)
        images = {  # leases that stay come first, side by side, so that they leave one hole
            group: runtime.gather.open_for_fill(group)
            for group in made
            if group.persistent or group.anchored
        }
    for index in range(len(units)):
        mine = [g for g, planned in zip(made, groups, strict=True) if planned.unit == index]
        Filler(runtime, units[index], mine, names, initialise, images).fill()
    materialise_buffers(model, names, initialise, runtime.device)
    share_buffers(comm, model, 2 * runtime.next_region_number())
    _install_hooks(runtime, units, groups, made, names)
    install_guards(model, made)
    modules = {group: units[plan.unit].module for group, plan in zip(made, groups, strict=True)}
    del units, groups  # they refer to the parameters, whose references are counted now
    warn_of_strays(modules)
    for group in made:
        group.across = tuple(across)
        for param in group.params:
            param.replicated = tuple(param.name in once for once in across.values())
            param.note_references()
    return model


def _across(
    runtime: Runtime,
    model: nn.Module,
    split_over: DeviceMesh | None,
    model_mesh: DeviceMesh | None,
    replicated: Iterable[str],
) -> dict[Communicator, frozenset[str]]:
    """The dimensions that the model is split over, and which parameters are the same on all ranks of
    each; see [Note: split models] (norms.py). Raises `StateError` for names the model lacks."""
    given = frozenset(replicated)
    params = dict(model.named_parameters(remove_duplicate=False))
    unknown = given - set(params)
    if unknown:
        raise StateError(f"replicated names no parameters: {', '.join(sorted(unknown)[:5])}")
    result: dict[Communicator, frozenset[str]] = {}
    if split_over is not None:
        splits = {name: Split.of(param) for name, param in params.items()}
        whole = {name for name, split in splits.items() if split is not None and split.replicated}
        plain = {name for name, split in splits.items() if split is None}
        same = given if model_mesh == split_over else plain  # of ordinary parameters
        result[runtime.communicator(group_of(split_over))] = frozenset(whole | same)
    if model_mesh is not None and model_mesh != split_over:
        result[runtime.communicator(group_of(model_mesh))] = given
    return result


def group_of(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """The ranks of a mesh of one dimension; None: all ranks. Raises `StateError` for another mesh."""
    if mesh is None:
        return None
    if mesh.ndim != 1:
        raise StateError(
            f"the mesh has {mesh.ndim} dimensions; shard over one of them, for example mesh['dp']"
        )
    return mesh.get_group()


def _check_arguments(model: object, runtime: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"shard takes a torch.nn.Module and a Runtime, not a {type(model).__name__} first"
        )
    if not isinstance(runtime, Runtime):
        raise TypeError(
            f"shard takes a torch.nn.Module and a Runtime, not a {type(runtime).__name__} second. "
            f"Remedy: with tiermem.Runtime(config) as runtime: tiermem.shard(model, runtime)"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise StateError(
                f"{name or 'the model'!r} is a ScriptModule ({type(module).__name__}), whose code "
                f"keeps its own parameters. Remedy: shard the module that it was made from"
            )


def _check_launch() -> None:
    """Raises `StateError` where several processes would train apart without a word."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1" and not (dist.is_available() and dist.is_initialized()):
        raise StateError(
            f"WORLD_SIZE is {count}, but torch.distributed is not initialized: each process would "
            f"train a model of its own. Remedy: torch.distributed.init_process_group('gloo') before "
            f"shard(); if that is what you want, unset WORLD_SIZE"
        )


def _check_beside_others(runtime: Runtime, plan: DevicePlan) -> None:
    """Device memory was divided when the first model came; a further one needs room beside what
    never leaves. Raises `BudgetError`."""
    stays = sum(round_up(g.nbytes) for g in runtime.groups if g.persistent or g.anchored)
    if runtime.device_store is not None:
        stays += runtime.device_store.stats().host_bytes
    needed = stays + plan.smallest_budget
    budget = runtime.device_plan_budget
    if needed > budget:
        raise BudgetError(
            f"device memory was opened with {format_bytes(budget)} ({budget} bytes) for the models "
            f"before; beside what of them never leaves, this one needs {format_bytes(needed)} "
            f"({needed} bytes) in all. Remedy: give device_memory (at least {needed}) in the config"
        )


def _install_hooks(
    runtime: Runtime,
    units: Sequence[PlannedUnit],
    planned: Sequence[PlannedGroup],
    made: Sequence[ParamGroup],
    names: dict[nn.Module, str],
) -> None:
    """One pair of hooks on each unit's module, and on each module outside of a unit that names a
    parameter of it (tied weights)."""
    needs: dict[nn.Module, dict[ParamGroup, None]] = {}
    unit = None
    for index, unit in enumerate(units):
        inside = set(unit.module.modules())
        for group, plan in zip(made, planned, strict=True):
            if plan.unit != index:
                continue
            needs.setdefault(unit.module, {})[group] = None
            for param in group.params:
                for slot in param.slots:
                    if slot.module not in inside:
                        needs.setdefault(slot.module, {})[group] = None
    for module, groups in needs.items():
        runtime.forward.install(Unit(module, names[module], list(groups)))


def _make_records(
    runtime: Runtime, group: ParamGroup, param_fraction: float, state_fraction: float
) -> None:
    config = runtime.config
    if not group.persistent:
        tier = Tier(config.params)
        fraction = param_fraction if tier is Tier.NVME else 0.0
        spec = RecordSpec(group.name, Field.PARAM, group.record_bytes, tier, fraction)
        group.record = add_record(runtime.store, spec)
    for region in group.regions:
        for state in master_states(region.layout.dtype, config) if region.trainable else ():
            add_state(runtime, group, region, state, state_fraction)


def add_state(
    runtime: Runtime,
    group: ParamGroup,
    region: Region,
    state: StateSpec,
    fraction: float,
) -> None:
    """Makes the record of one optimizer state, where the configuration wants it."""
    name = state.name
    if name in region.states or region.owned.numel == 0:
        return
    tier = Tier(runtime.config.optimizer)
    nbytes = round_up(state.nbytes(region.owned.numel))
    label = f"{group.name}[{region.layout.index}]"
    if tier is Tier.DEVICE:
        assert runtime.device_store is not None
        store, spec = runtime.device_store, RecordSpec(label, name, nbytes, Tier.HOST)
    elif group.small or tier is Tier.HOST:
        store, spec = runtime.store, RecordSpec(label, name, nbytes, Tier.HOST)
    else:
        store, spec = runtime.store, RecordSpec(label, name, nbytes, Tier.NVME, fraction)
    region.states[name] = StateRecord(add_record(store, spec), store, state)


def add_record(store: TieredStore, spec: RecordSpec) -> Record:
    """Adds a record; without its resident part where rounding to stripes has used that up."""
    try:
        return store.add(spec)
    except BudgetError:
        if spec.tier is not Tier.NVME or spec.host_fraction == 0:
            raise
        return store.add(replace(spec, host_fraction=0.0))
