"""Values of DeepSpeed's keys: numbers that may be strings, and a message for what cannot work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiermem.config.deepspeed_key import Key, Kind


def parse(key: Key, value: Any) -> Any:
    """``value`` as the key's kind. Raises `ValueError` that says what would work."""
    if key.infinite is not None and value in (math.inf, "inf", "Infinity"):
        return key.infinite
    return _PARSERS[key.kind](key, value)


def shown(value: Any) -> str:
    """A value as JSON writes it, for messages."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e5:
        return f"{value:g}".replace("e+0", "e").replace("e+", "e")
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def number_of(value: Any) -> float | int | None:
    """A finite number, or a string that spells one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _int(key: Key, value: Any) -> int:
    number = number_of(value)
    if number is None or number != int(number):
        raise ValueError(f"must be a whole number, for example {_example(key, 1000)}; " + _got(value))
    return int(_in_range(key, int(number)))


def _number(key: Key, value: Any) -> float:
    number = number_of(value)
    if number is None:
        raise ValueError(f"must be a number, for example {_example(key, 0.5)}; " + _got(value))
    return float(_in_range(key, number))


def _numbers(key: Key, value: Any) -> float | list[float]:
    if isinstance(value, (list, tuple)) and value:
        return [_number(key, each) for each in value]
    return _number(key, value)


def _pair(key: Key, value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("must be two numbers, for example [0.9, 0.999]; " + _got(value))
    first, second = (_number(key, each) for each in value)
    return first, second


def _bool(key: Key, value: Any) -> bool:
    text = str(value).lower()
    if text in ("true", "false"):
        return text == "true"
    if value in (0, 1):
        return bool(value)
    raise ValueError(f"must be true or false; {_got(value)}")


def _text(key: Key, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a name, for example {_example(key, 'name')}; " + _got(value))
    return value


def _choice(key: Key, value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in key.choices:
        raise ValueError(f"must be one of {', '.join(key.choices)}; {_got(value)}")
    return value.lower()


def _paths(key: Key, value: Any) -> tuple[str, ...]:
    paths = value if isinstance(value, (list, tuple)) else (value,)
    if not paths or not all(isinstance(each, (str, Path)) and str(each) for each in paths):
        raise ValueError(f"must be a directory, for example {_example(key, '/nvme')}; " + _got(value))
    return tuple(str(Path(each).expanduser()) for each in paths)


def _names(key: Key, value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(each, str) and each for each in names):
        raise ValueError(f"must be names, for example {_example(key, ['name'])}; " + _got(value))
    return tuple(names)


def _object(key: Key, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        example = _example(key, {"enabled": False})
        raise ValueError(f"must be an object, for example {example}; " + _got(value))
    return value


def _in_range(key: Key, number: float | int) -> float | int:
    if key.low is not None and number < key.low:
        raise ValueError(f"must be at least {shown(key.low)}; {_got(number)}")
    if key.high is not None and number > key.high:
        raise ValueError(f"must be at most {shown(key.high)}; {_got(number)}")
    if key.below is not None and number >= key.below:
        raise ValueError(f"must be below {shown(key.below)}; {_got(number)}")
    return number


def _example(key: Key, otherwise: Any) -> str:
    return shown(otherwise if key.example is None else key.example)


def _got(value: Any) -> str:
    return f"got {shown(value)}"


_PARSERS: Mapping[Kind, Callable[[Key, Any], Any]] = {
    "int": _int,
    "number": _number,
    "numbers": _numbers,
    "pair": _pair,
    "bool": _bool,
    "text": _text,
    "choice": _choice,
    "paths": _paths,
    "names": _names,
    "object": _object,
}
