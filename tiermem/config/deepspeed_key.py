"""`Key`: one key of DeepSpeed's configuration, and what it does here."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "number", "numbers", "pair", "bool", "text", "choice", "paths", "names", "object"]


class Role(enum.Enum):
    """What becomes of a key."""

    ACTS = "acts"
    PART = "acts in part"
    NO_OP = "no-op"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """One key: the reader checks values with it, and the documentation's table is made of it.

    ``default`` is DeepSpeed's. ``here`` says what the key does here; for `Role.NO_OP` why it has no
    effect, for `Role.REFUSED` why and what to do instead.
    """

    name: str
    """Dotted, as today's DeepSpeed spells it."""
    kind: Kind
    default: Any
    role: Role
    meaning: str
    here: str
    auto: str | None = None
    """What ``"auto"`` becomes; None: it cannot be ``"auto"``."""
    no_auto: str = "give a value"
    """What to do instead of ``"auto"``."""
    fine: tuple[Any, ...] = ()
    """`Role.REFUSED`: values that are accepted. `Role.NO_OP`: values that need no word."""
    low: float | None = 0
    high: float | None = None
    below: float | None = None
    infinite: Any = None
    """What an infinite number becomes; None: it is a mistake."""
    choices: tuple[str, ...] = ()
    example: Any = None
    """A value that works, for messages."""
    stage3: bool = False
    """Acts at stage 3 only."""
    aliases: tuple[str, ...] = ()
    """Old or other names of it, dotted; each is understood, with a note that names today's."""
    also: tuple[str, ...] = ()
    """Names of it that are as good today."""
    fields: tuple[str, ...] = ()
    """An object's keys, where its contents are not keys of the table; empty: not looked at."""
    is_on: Callable[[Mapping[str, Any]], bool] | None = None
    """An object: whether it asks for anything."""

    @property
    def block(self) -> str:
        """The dotted name of what it lies in, empty at the top level."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The name within its block."""
        return self.name.rpartition(".")[2]


def no_op(name: str, default: Any, meaning: str, why: str, **more: Any) -> Key:
    """A key without effect; DeepSpeed's default needs no word, unless ``fine`` says otherwise."""
    return _of_default(name, default, Role.NO_OP, meaning, why, more)


def refused(name: str, default: Any, meaning: str, remedy: str, **more: Any) -> Key:
    """A key of which only DeepSpeed's default is accepted, unless ``fine`` says otherwise."""
    return _of_default(name, default, Role.REFUSED, meaning, remedy, more)


def _of_default(
    name: str, default: Any, role: Role, meaning: str, here: str, more: dict[str, Any]
) -> Key:
    kinds: dict[type, Kind] = {bool: "bool", int: "int", float: "number"}
    usual = {
        "kind": kinds.get(type(default), "text"),
        "auto": None if default is None else json.dumps(default),
        "fine": () if default is None else (default,),
    }
    return Key(name=name, default=default, role=role, meaning=meaning, here=here, **(usual | more))


@dataclass(frozen=True, slots=True)
class Legacy:
    """A key of old that says the same as others do today, in other words."""

    name: str
    kind: Kind
    today: str
    """What to write instead, for messages."""
    becomes: Callable[[Any], Mapping[str, Any]]
    """Today's dotted names and their values, for a value of the kind."""


def enabled(block: Mapping[str, Any]) -> bool:
    """Whether ``enabled`` asks for it."""
    return is_true(block.get("enabled"))


def anything_true(block: Mapping[str, Any]) -> bool:
    """Whether any value in it is true."""
    return any(str(value).lower() == "true" for value in block.values())


def anything_enabled(block: Mapping[str, Any]) -> bool:
    """Whether it, or anything in it, is ``enabled``."""
    return enabled(block) or any(
        anything_enabled(value) for value in block.values() if isinstance(value, Mapping)
    )


def not_empty(block: Mapping[str, Any]) -> bool:
    """Whether there is anything in it but nulls."""
    return any(value is not None for value in block.values())


def is_true(value: Any) -> bool:
    """Whether a value means true; ``"auto"`` does not."""
    return value is True or value == 1 or (isinstance(value, str) and value.lower() == "true")
