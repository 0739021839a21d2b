"""Leaf modules: modules that are gathered whole, with everything below them, under DeepSpeed's names.

[Note: leaf modules] Units are gathered when their forward begins. Where ranks may call different
modules, as the experts of a mixture are chosen by what each rank's tokens say, they would gather
different units, which is an error over several ranks. A leaf module is gathered as one: no module below
it is a unit, whatever ``wrap`` says, and it is a unit itself unless a unit encloses it already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from tiermem.errors import ConfigError, StateError
from tiermem.zero.placeholder import Placeholder

_FLAG = "_z3_leaf"
"""The attribute of a marked module; DeepSpeed's name, which other libraries look at."""


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Marks every module of ``model`` of one of the classes as a leaf, before `tiermem.shard`; returns
    these modules. A class is given itself or by its name, plain or with its module.

    Raises `ConfigError` for a class that occurs nowhere (with ``raise_if_not_found``), and `StateError`
    for a model that is sharded already.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Takes the marks of `set_z3_leaf_modules` back; returns the modules of these classes."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks one module as a leaf, or (not ``flag``) takes its mark back. Raises `StateError` if it is
    sharded already."""
    _check_unsharded(model)
    setattr(model, _FLAG, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked as a leaf."""
    return bool(getattr(model, _FLAG, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of ``model`` that are marked as leaves."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def outermost_leaves(model: nn.Module) -> tuple[set[nn.Module], set[nn.Module]]:
    """The leaf modules that no other leaf encloses, and all modules below them."""
    leaves: set[nn.Module] = set()
    below: set[nn.Module] = set()
    for module in model.modules():  # parents first
        if z3_leaf_module(module) and module not in below:
            leaves.add(module)
            below.update(inner for inner in module.modules() if inner is not module)
    return leaves - below, below


def _mark(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    _check_unsharded(model)
    wanted = list(classes)
    for each in wanted:
        if not isinstance(each, (type, str)):
            raise ConfigError(f"{each!r} is no class; leaf modules are given by class or class name")
    missing = [
        each if isinstance(each, str) else each.__name__
        for each in wanted
        if not any(_is_a(module, each) for module in model.modules())
    ]
    if missing and raise_if_not_found:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"{', '.join(missing)}: no module of the model is of this class. Its classes are: "
            f"{', '.join(kinds)}"
        )
    found = [module for module in model.modules() if any(_is_a(module, each) for each in wanted)]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_a(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _check_unsharded(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if isinstance(param, Placeholder):
            raise StateError(
                f"{name!r} is sharded already, so its unit is fixed. Remedy: mark leaf modules before "
                f"tiermem.shard"
            )
