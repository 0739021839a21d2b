"""Which modules become units of gather: repeated blocks, then the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tiermem.errors import ConfigError, StateError
from tiermem.zero import compat
from tiermem.zero.leaf_modules import outermost_leaves
from tiermem.zero.overlap import check_storages
from tiermem.zero.param import Slot
from tiermem.zero.placeholder import Placeholder
from tiermem.zero.split import check_split

Wrap = Iterable[nn.Module | str | type[nn.Module]] | None
"""What to wrap: modules, their qualified names, or classes; None finds repeated blocks."""


@dataclass(slots=True, eq=False)
class PlannedParam:
    """One distinct parameter with every slot that names it, the first first."""

    name: str
    param: nn.Parameter
    slots: list[Slot] = field(default_factory=list)

    @property
    def part(self) -> torch.Tensor:
        """What of it is here: of a DTensor this rank's part; see [Note: split parameters]."""
        return compat.local_tensor(self.param)


@dataclass(slots=True, eq=False)
class PlannedUnit:
    """A unit before anything is moved. ``depth_chain``: indices of the units that enclose it."""

    name: str
    module: nn.Module
    params: list[PlannedParam] = field(default_factory=list)
    enclosing: list[int] = field(default_factory=list)


def plan_units(model: nn.Module, wrap: Wrap) -> list[PlannedUnit]:
    """Assigns every parameter of ``model`` to one unit. Raises `StateError` for one that cannot be
    sharded.

    A parameter belongs to the innermost wrapped module that holds it; what no wrapped module holds
    goes to a unit for the module that names it. A tied parameter belongs to the first. Below a leaf
    module nothing is wrapped; see [Note: leaf modules].
    """
    names = {module: name for name, module in model.named_modules()}
    chosen = _choose(model, wrap, names)
    owner: dict[nn.Module, nn.Module] = {}
    # Named modules come parents first, so that inner wrapped modules claim their contents last.
    for module in names:
        if module in chosen:
            for inner in module.modules():
                owner[inner] = module
    units: dict[nn.Module, PlannedUnit] = {}
    known: dict[int, PlannedParam] = {}
    for module, name in names.items():
        for key, param in module._parameters.items():
            if param is None:
                continue
            _check(param, f"{name}.{key}".lstrip("."))
            planned = known.get(id(param))
            if planned is None:
                holder = owner.get(module, module)
                unit = units.setdefault(holder, PlannedUnit(names[holder] or "(root)", holder))
                planned = known[id(param)] = PlannedParam(f"{name}.{key}".lstrip("."), param)
                unit.params.append(planned)
            planned.slots.append(Slot(module, key))
    check_storages(known.values())
    result = list(units.values())
    _find_enclosing(result)
    return result


def _check(param: nn.Parameter, name: str) -> None:
    if isinstance(param, Placeholder):
        raise StateError(
            f"{name!r} is sharded already (as {param._handle.name!r}). Remedy: shard a model once, and "
            f"models that share modules or parameters together, before any of them is: "
            f"tiermem.shard(torch.nn.ModuleList([first, second]), runtime)"
        )
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise StateError(
            f"{name!r} is not initialised (a lazy module). Remedy: run one forward on a small input "
            f"before tiermem.shard"
        )
    if param.is_sparse or param.layout.__str__() != "torch.strided":
        raise StateError(f"{name!r} has layout {param.layout}; only strided parameters are sharded")
    check_split(param, name)
    if param.is_inference() and param.device.type != "meta":  # those are made anew
        raise StateError(
            f"{name!r} was made under torch.inference_mode() and cannot be trained. Remedy: build the "
            f"model outside of it, or inside torch.inference_mode(False)"
        )
    if param.grad is not None:
        raise StateError(f"{name!r} has a gradient. Remedy: model.zero_grad() before tiermem.shard")


def _find_enclosing(units: Sequence[PlannedUnit]) -> None:
    inner = [set(unit.module.modules()) for unit in units]
    for index, unit in enumerate(units):
        unit.enclosing = [
            other for other in range(len(units)) if other != index and unit.module in inner[other]
        ]


def _choose(model: nn.Module, wrap: Wrap, names: dict[nn.Module, str]) -> set[nn.Module]:
    """The modules that are wrapped."""
    leaves, below = outermost_leaves(model)
    closed = leaves | below
    chosen = _repeated_blocks(model, closed) if wrap is None else _explicit(model, wrap, names)
    chosen -= below
    covered = {inner for module in chosen for inner in module.modules()}
    return chosen | (leaves - covered)


def _repeated_blocks(model: nn.Module, closed: set[nn.Module]) -> set[nn.Module]:
    """Outermost children of containers that occur at least twice with the same class and hold
    parameters (the layers of a transformer, the stages of a residual network). Not those of ``closed``
    containers."""
    chosen: set[nn.Module] = set()
    covered: set[nn.Module] = set()
    for module in model.modules():
        if module in covered or module in closed:
            continue
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        counts = Counter(type(child) for child in children)
        for child in children:
            if counts[type(child)] >= 2 and child not in covered:
                chosen.add(child)
                covered.update(child.modules())
    return chosen


def _explicit(
    model: nn.Module, wrap: Iterable[nn.Module | str | type[nn.Module]], names: dict[nn.Module, str]
) -> set[nn.Module]:
    by_name = {name: module for module, name in names.items()}
    chosen: set[nn.Module] = set()
    for item in wrap:
        if isinstance(item, str):
            if item not in by_name:
                raise ConfigError(f"wrap names {item!r}, which is not a module of the model")
            chosen.add(by_name[item])
        elif isinstance(item, type):
            found = {module for module in names if isinstance(module, item)}
            if not found:
                raise ConfigError(f"wrap names the class {item.__name__}, which the model does not use")
            chosen |= found
        elif item in names:
            chosen.add(item)
        else:
            raise ConfigError(f"wrap names a {type(item).__name__} that is not in the model")
    return chosen
