"""`Reading`: DeepSpeed's configuration, key by key against the table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiermem.config.deepspeed_key import Key, Legacy, Role
from tiermem.config.deepspeed_keys import TABLE
from tiermem.config.deepspeed_value import parse, shown

_COMMENT = ("_", "#", "//")
_ZERO = "zero_optimization"


@dataclass(slots=True)
class Reading:
    """What a configuration says, by today's dotted names; and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)
    """Checked values of keys that were given."""
    given: dict[str, Any] = field(default_factory=dict)
    """The same as they were written."""
    auto: dict[str, str] = field(default_factory=dict)
    """Keys that are ``"auto"``, and what that becomes."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _spelled: dict[str, str] = field(default_factory=dict)

    def problem(self, name: str, text: str) -> None:
        """Notes a mistake."""
        self.problems.append(f"{name}: {text}")

    def read(self, source: Mapping[str, Any], block: str = "") -> None:
        """Takes everything in ``source``, which lies in ``block`` (as it was spelled, or empty)."""
        for written, value in source.items():
            if not isinstance(written, str):
                self.problem(block or "(whole)", f"keys must be strings, not {written!r}")
            elif not written.startswith(_COMMENT):
                self._read_one(f"{block}.{written}" if block else written, value)

    def of(self, name: str, default: Any = None) -> Any:
        """The value of a key, if it was given and not ``"auto"``."""
        return self.values.get(name, default)

    def take(self, key: Key, spelling: str, value: Any) -> None:
        """Checks one value of a key."""
        if isinstance(value, str) and value.lower() == "auto" and "auto" not in key.choices:
            self._take_auto(key, spelling)
            return
        try:
            checked = parse(key, value)
        except ValueError as error:
            self.problem(spelling, str(error))
            return
        if not self._is_first(key, spelling, checked):
            return
        self.values[key.name], self.given[key.name] = checked, value
        if key.role is Role.REFUSED and _asks(key, checked):
            what = "" if key.kind == "object" else f"{shown(value)} is "
            self.problem(spelling, f"{what}refused: {key.here}")
        if key.role is Role.NO_OP and _asks(key, checked):
            what = "" if key.kind == "object" else f"{shown(value)} "
            self.notes.append(f"{spelling}: {what}has no effect here ({key.here})")

    def _read_one(self, spelling: str, value: Any) -> None:
        name = TABLE.today(spelling)
        if name == _ZERO and isinstance(value, bool):
            self.notes.append(f'{_ZERO}: {shown(value)} is an old form of {{"stage": {int(value)}}}')
            value = {"stage": int(value)}
        if name not in TABLE.keys and name not in TABLE.legacy:
            self.problem(spelling, TABLE.suggestion(name))
        elif value is None:
            return  # as if it had been left out
        elif name in TABLE.legacy:
            self._take_legacy(TABLE.legacy[name], value)
        else:
            key = TABLE.keys[name]
            if spelling in TABLE.old:
                self.notes.append(f"{spelling} is another name of {key.name}; today's is the latter")
            if key.kind == "object":
                self._take_object(key, spelling, value)
            else:
                self.take(key, spelling, value)

    def _take_object(self, key: Key, spelling: str, value: Any) -> None:
        before = len(self.problems)
        children = TABLE.children(key.name)
        if children and isinstance(value, Mapping):
            self.read(value, spelling)
            return
        self.take(key, spelling, value)
        if isinstance(value, Mapping) and key.fields and len(self.problems) == before:
            for name in value:
                if name not in key.fields and not str(name).startswith(_COMMENT):
                    near = difflib.get_close_matches(str(name), key.fields, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(key.fields)}"
                    self.problem(f"{spelling}.{name}", f"unknown key; {hint}")

    def _take_legacy(self, legacy: Legacy, value: Any) -> None:
        stand_in = Key(legacy.name, legacy.kind, None, Role.ACTS, "", "")
        try:
            checked = parse(stand_in, value)
        except ValueError as error:
            self.problem(legacy.name, str(error))
            return
        self.notes.append(f"{legacy.name} is an old key; today that is {legacy.today}")
        for name, today in legacy.becomes(checked).items():
            self.take(TABLE.keys[name], f"{legacy.name}: {shown(value)}", today)

    def _take_auto(self, key: Key, spelling: str) -> None:
        if key.auto is None:
            self.problem(spelling, f'"auto" cannot be known here; {key.no_auto}')
        elif self._is_first(key, spelling, "auto"):
            self.auto[key.name] = key.auto

    def _is_first(self, key: Key, spelling: str, value: Any) -> bool:
        """Whether no other spelling of the key came before; one with another value is a mistake."""
        other = self._spelled.setdefault(key.name, spelling)
        if other == spelling:
            return True
        before = self.values.get(key.name, "auto")
        if before != value:
            self.problem(
                spelling,
                f"says {shown(value)}, but {other} says {shown(before)}; keep one of them",
            )
        return False


def _asks(key: Key, value: Any) -> bool:
    """Whether a value is more than what happens anyway."""
    if key.kind == "object":
        return key.is_on is None or key.is_on(value)
    return value not in key.fine
