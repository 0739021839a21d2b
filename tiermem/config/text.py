"""JSON as people write it: with comments, trailing commas, tabs and a byte order mark.

``//`` and ``#`` begin a comment that ends with its line, ``/* */`` enclose one. A comma may follow the
last member. Everything else is JSON (RFC 8259); keys that occur twice in one object are a mistake.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tiermem.errors import ConfigError

_SPACE = re.compile(r"[ \t\r\n]*")
_LINE_COMMENT = re.compile(r"[^\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_STRING = re.compile(r'"(?:[^"\\\r\n]|\\.)*"')
_WORD = re.compile(r"[^\s,:{}\[\]\"#/]+")
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 100
_SHOWN = 24
_MOST_DIGITS = 400  # no number of a configuration has as many


class TextError(ConfigError):
    """A text that is not JSON; the message ends with line, column and the text there."""


def parse_lenient(text: str) -> Any:
    """The value that ``text`` describes.

    Whole numbers are `int`, all others `float`; objects are `dict`, in the order of the text. Raises
    `TextError`.
    """
    reader = _Reader(text.removeprefix("\ufeff"))
    reader.skip()
    value = reader.value(())
    reader.skip()
    if reader.at < len(reader.text):
        reader.fail("the value has ended before this; remove what follows it")
    return value


def read_json(path: Path) -> Any:
    """The contents of a JSON file (see `parse_lenient`). Raises `ConfigError`."""
    try:
        return parse_lenient(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except TextError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


@dataclass(slots=True)
class _Reader:
    """A position in a text, and what can be read from there."""

    text: str
    at: int = 0

    def value(self, where: tuple[str, ...]) -> Any:
        """The value here; ``where`` are the keys that lead to it."""
        if len(where) > _MAX_DEPTH:
            self.fail(f"more than {_MAX_DEPTH} levels of nesting")
        match self.text[self.at : self.at + 1]:
            case "{":
                return self._object(where)
            case "[":
                return self._array(where)
            case '"':
                return self._string()
            case _:
                return self._scalar()

    def skip(self) -> None:
        """Goes past white space and comments."""
        while True:
            self._take(_SPACE)
            if self.text.startswith(("//", "#"), self.at):
                self._take(_LINE_COMMENT)
            elif self.text.startswith("/*", self.at):
                end = self.text.find("*/", self.at + 2)
                if end < 0:
                    self.fail("a comment begins here that no '*/' ends")
                self.at = end + 2
            else:
                return

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        """Raises with the place and the text there."""
        at = self.at if at is None else at
        before = self.text[:at].replace("\r\n", "\n").replace("\r", "\n")
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        rest = re.split(r"[\r\n]", self.text[at:], maxsplit=1)[0]
        there = repr(rest[:_SHOWN] + ("..." if len(rest) > _SHOWN else "")) if rest else "the line ends"
        if at >= len(self.text):
            there = "the text ends"
        raise TextError(f"{problem} (line {line}, column {column}: {there})")

    def _object(self, where: tuple[str, ...]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self.at += 1
        while True:
            self.skip()
            if self._accept("}"):
                return members
            start = self.at
            if not self.text.startswith('"', start):
                self.fail('expected a key in "double quotes", or }')
            key = self._string()
            if key in members:
                self.fail(f"{'.'.join((*where, key))} is given twice; keep one of the two", start)
            self.skip()
            if not self._accept(":"):
                self.fail(f"expected : after the key {key!r}")
            self.skip()
            members[key] = self.value((*where, key))
            self._separate("}")

    def _array(self, where: tuple[str, ...]) -> list[Any]:
        items: list[Any] = []
        self.at += 1
        while True:
            self.skip()
            if self._accept("]"):
                return items
            items.append(self.value((*where, str(len(items)))))
            self._separate("]")

    def _separate(self, closing: str) -> None:
        """Between two members, or after the last one."""
        self.skip()
        if not self._accept(",") and not self.text.startswith(closing, self.at):
            self.fail(f"expected , or {closing}")

    def _string(self) -> str:
        start = self.at
        token = self._take(_STRING)
        if not token:
            self.fail('a string begins here that no " ends on this line')
        try:
            value = json.loads(token, strict=False)  # a tab in a string is taken as it is
        except json.JSONDecodeError as error:
            self.fail(f"{error.msg} in this string", start)
        assert isinstance(value, str)
        return value

    def _scalar(self) -> Any:
        start = self.at
        word = self._take(_WORD)
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        number = _NUMBER.fullmatch(word)
        if number is None:
            self.fail("expected a value" + self._hint(word), start)
        if len(word) > _MOST_DIGITS:
            self.fail(f"a number of {len(word)} characters", start)
        return float(word) if number[1] or number[2] else int(word)

    def _hint(self, word: str) -> str:
        if word.lower() in ("true", "false", "none", "null"):
            right = {"none": "null"}.get(word.lower(), word.lower())
            return f"; JSON writes {right}"
        if word.startswith("'"):
            return '; JSON takes "double quotes"'
        if re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?|[-+]?(nan|inf(inity)?)", word, re.IGNORECASE):
            return "; JSON writes numbers as 12, -0.5 or 1e-8"
        return '; names are written in "double quotes"' if word else ""

    def _accept(self, character: str) -> bool:
        found = self.text.startswith(character, self.at)
        self.at += found
        return found

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match[0]
