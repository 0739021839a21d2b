"""Parameter objects that somebody has kept from before `shard`.

[Note: strays] The real parameter persists under its placeholder, but has values only while its group
is gathered. A module that keeps its own parameters in a list (as nn.LSTM does) sees them then. A list
made elsewhere, an optimizer or an average of weights made before would read NaN, so it is named.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence

from torch import nn

from tiermem.zero.group import ParamGroup
from tiermem.zero.param import ShardedParam


def warn_of_strays(groups: Mapping[ParamGroup, nn.Module]) -> None:
    """Warns of references to the parameters of ``groups`` from outside of their units' modules."""
    suspects = {
        id(param.real): (param, module)
        for group, module in groups.items()
        for param in group.params
        if param.num_references > 0
    }
    if not suspects:
        return
    known = _kept_by_own_module(suspects)
    names = [p.name for key, (p, _) in suspects.items() if p.num_references > known.get(key, 0)]
    if names:
        warnings.warn(
            f"parameters collected before tiermem.shard() are still referred to elsewhere, where they "
            f"have no values while they are sharded: {_enumerate(names)}. Remedy: take them from the "
            f"model again afterwards (an optimizer is made after shard()); a single one is often just "
            f"the variable of a loop over model.parameters(), and does no harm",
            UserWarning,
            stacklevel=3,
        )


def _kept_by_own_module(suspects: Mapping[int, tuple[ShardedParam, nn.Module]]) -> dict[int, int]:
    """References from containers that are attributes of modules inside the parameter's own unit."""
    known: dict[int, int] = {}
    attributes: dict[nn.Module, set[int]] = {}
    for _, module in suspects.values():
        if module not in attributes:
            attributes[module] = {id(v) for m in module.modules() for v in vars(m).values()}
    for holder in gc.get_referrers(*(param.real for param, _ in suspects.values())):
        for referent in gc.get_referents(holder):
            suspect = suspects.get(id(referent))
            if suspect is not None and id(holder) in attributes[suspect[1]]:
                known[id(referent)] = known.get(id(referent), 0) + 1
    return known


def _enumerate(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
