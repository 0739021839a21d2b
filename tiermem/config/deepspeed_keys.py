"""The table of DeepSpeed's keys, and how a name is found in it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiermem.config.deepspeed_key import Key, Legacy, Role
from tiermem.config.deepspeed_keys_core import CORE_KEYS
from tiermem.config.deepspeed_keys_other import OTHER_KEYS
from tiermem.config.deepspeed_keys_zero import ZERO_KEYS

_ZERO = "zero_optimization"

KEYS: tuple[Key, ...] = (*CORE_KEYS, *ZERO_KEYS, *OTHER_KEYS)


def _offload(block: str) -> Any:
    return lambda value: {f"{_ZERO}.{block}.device": "cpu" if value else "none"}


LEGACY: tuple[Legacy, ...] = (
    Legacy(
        f"{_ZERO}.cpu_offload",
        "bool",
        f'{_ZERO}.offload_optimizer: {{"device": "cpu"}}',
        _offload("offload_optimizer"),
    ),
    Legacy(
        f"{_ZERO}.cpu_offload_param",
        "bool",
        f'{_ZERO}.offload_param: {{"device": "cpu"}}',
        _offload("offload_param"),
    ),
    Legacy(
        f"{_ZERO}.cpu_offload_use_pin_memory",
        "bool",
        "pin_memory in offload_param and offload_optimizer",
        lambda value: {
            f"{_ZERO}.offload_param.pin_memory": value,
            f"{_ZERO}.offload_optimizer.pin_memory": value,
        },
    ),
    Legacy(
        "allgather_size",
        "int",
        f"{_ZERO}.allgather_bucket_size",
        lambda value: {f"{_ZERO}.allgather_bucket_size": value},
    ),
    Legacy(
        "fp32_allreduce",
        "bool",
        'communication_data_type: "fp32"',
        lambda value: {"communication_data_type": "fp32"} if value else {},
    ),
)


@dataclass(frozen=True, slots=True)
class Table:
    """All names that DeepSpeed understands, each with what it stands for."""

    keys: Mapping[str, Key]
    """By today's name."""
    names: Mapping[str, str]
    """Every spelling that is a key, and today's name of it."""
    old: frozenset[str]
    """Those spellings that have a better one today."""
    legacy: Mapping[str, Legacy]

    @property
    def top_level(self) -> frozenset[str]:
        """What may stand at the top level."""
        return frozenset(name for name in (*self.names, *self.legacy) if "." not in name)

    def today(self, name: str) -> str:
        """``name`` with today's name of each block that it lies in."""
        block, dot, last = name.rpartition(".")
        inside = f"{self.today(block)}{dot}{last}" if block else name
        return self.names.get(inside, inside)

    def children(self, block: str) -> tuple[Key, ...]:
        """The keys that lie in a block."""
        return tuple(key for key in self.keys.values() if key.block == block)

    def suggestion(self, name: str) -> str:
        """What an unknown dotted ``name`` may have been meant to be."""
        block, _, last = name.rpartition(".")
        spellings = (*self.names, *self.legacy)
        homes = [each.rpartition(".")[0] for each in spellings if each.rpartition(".")[2] == last]
        if block.rpartition(".")[2] == last:
            return "unknown key: it says again what it lies in; leave it out"
        if homes:
            places = [f"into {home}" if home else "at the top level" for home in homes]
            return f"unknown key here: {last} belongs {' or '.join(places)}"
        near = _nearest(last, [each for each in spellings if each.rpartition(".")[0] == block], 0.7)
        near = near or _nearest(last, list(spellings), 0.8)
        if near:
            return f"unknown key; did you mean {near!r}?" + self._newer(near)
        return "unknown key, and not near any of DeepSpeed's; leave it out"

    def _newer(self, spelling: str) -> str:
        if spelling in self.legacy:
            return f" Today that is {self.legacy[spelling].today}"
        return f" Today that is {self.names[spelling]}" if spelling in self.old else ""


def make_table() -> Table:
    """The table of `KEYS` and `LEGACY`."""
    names = {key.name: key.name for key in KEYS}
    for key in KEYS:
        names |= dict.fromkeys((*key.aliases, *key.also), key.name)
    old = frozenset(alias for key in KEYS for alias in key.aliases)
    legacy = {each.name: each for each in LEGACY}
    return Table({key.name: key for key in KEYS}, names, old, legacy)


def _nearest(last: str, spellings: list[str], cutoff: float) -> str | None:
    """The dotted spelling whose last part is nearest to ``last``, whatever its case."""
    by_last = {each.rpartition(".")[2]: each for each in reversed(spellings)}
    near = difflib.get_close_matches(last.lower(), by_last, n=1, cutoff=cutoff)
    return by_last[near[0]] if near else None


TABLE = make_table()

__all__ = ["KEYS", "LEGACY", "TABLE", "Key", "Legacy", "Role", "Table"]
