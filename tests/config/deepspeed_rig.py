"""Shared by the tests of DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tiermem.config import DeepSpeedConfig, read_deepspeed
from tiermem.errors import ConfigError


def nested(name: str, value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for the dotted name ``a.b``."""
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings put together, at every level; the later wins."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
                value = merged(result[key], value)
            result[key] = value
    return result


def problems(config: Mapping[str, Any]) -> list[str]:
    """The mistakes in a configuration that is refused, a line each."""
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(config)
    first, *lines = str(caught.value).split("\n  ")
    assert first == (
        f"{len(lines)} problem{'s' if len(lines) > 1 else ''} in the DeepSpeed configuration:"
    )
    return lines


def problem(config: Mapping[str, Any]) -> str:
    """The one mistake in a configuration that is refused."""
    (line,) = problems(config)
    return line


def acting(config: DeepSpeedConfig) -> dict[str, Any]:
    """All that a configuration does: everything but what is said about it."""
    return {
        "tier": config.tier.model_dump(),
        **{
            name: getattr(config, name)
            for name in config.__dataclass_fields__
            if name not in ("tier", "notes", "effective")
        },
    }


def effective(config: DeepSpeedConfig) -> dict[str, Any]:
    """The values that act, by key."""
    return {name: each.value for name, each in config.effective.items()}
