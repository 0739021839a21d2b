"""The table of docs/deepspeed.md: ``python -m tiermem.config.deepspeed_table``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from tiermem.config.deepspeed_key import Key, Role
from tiermem.config.deepspeed_keys import KEYS, LEGACY
from tiermem.config.deepspeed_named import OPTIMIZERS, SCHEDULERS
from tiermem.config.deepspeed_value import shown

BEGIN = "<!-- begin of what `python -m tiermem.config.deepspeed_table` prints -->"
END = "<!-- end of what it prints -->"

_BLOCKS = {
    "zero_optimization": "`zero_optimization`",
    "zero_optimization.offload_param": "`zero_optimization.offload_param`",
    "zero_optimization.offload_optimizer": "`zero_optimization.offload_optimizer`",
    "zero_optimization.leaf_module": "`zero_optimization.leaf_module`",
    "bf16": "`bf16`",
    "fp16": "`fp16`",
    "data_types": "`data_types`",
    "aio": "`aio`",
    "optimizer": "`optimizer`",
    "scheduler": "`scheduler`",
    "checkpoint": "`checkpoint`",
}


def table() -> str:
    """Every key, by block, in Markdown; ends with a line feed."""
    lines = [BEGIN, ""]
    lines += _section("Top level", [key for key in KEYS if not key.block])
    for block, title in _BLOCKS.items():
        lines += _section(title, [key for key in KEYS if key.block == block])
    for block, types in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        lines += _section(f"`{block}.params`", _with_types(types.items()))
    lines += ["### Other names", "", "| name | today's |", "|---|---|", *_other_names(), "", END]
    return "\n".join(lines) + "\n"


def _section(title: str, keys: Iterable[Key | tuple[Key, list[str]]]) -> list[str]:
    head = ["| key | default | | meaning | here |", "|---|---|---|---|---|"]
    return [f"### {title}", "", *head, *(_row(*_unpack(each)) for each in keys), ""]


def _unpack(each: Key | tuple[Key, list[str]]) -> tuple[Key, list[str]]:
    return (each, []) if isinstance(each, Key) else each


def _row(key: Key, types: list[str]) -> str:
    meaning = f"{', '.join(types)}: {key.meaning}" if types else key.meaning
    cells = (f"`{key.last}`", _default(key), _role(key), meaning, _here(key))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: Key) -> str:
    if key.default is None or key.default == {}:
        return ""
    return f"`{shown(key.default)}`"


def _role(key: Key) -> str:
    if key.role is Role.REFUSED:
        return "refused if enabled" if key.kind == "object" else "refused"
    return str(key.role.value)


def _here(key: Key) -> str:
    parts = [key.here]
    if key.role is Role.REFUSED and key.fine and set(key.fine) != {key.default}:
        parts.append(f"accepted: {', '.join(f'`{shown(value)}`' for value in key.fine)}")
    if key.role is Role.ACTS and key.auto is not None and key.auto != shown(key.default):
        parts.append(f'`"auto"`: {key.auto}')
    return ". ".join(part[:1].upper() + part[1:] if at else part for at, part in enumerate(parts))


def _with_types(types: Iterable[tuple[str, tuple[Key, ...]]]) -> Iterator[tuple[Key, list[str]]]:
    """Each argument once, with the types that take it."""
    takers: dict[str, tuple[Key, list[str]]] = {}
    for name, keys in types:
        for key in keys:
            takers.setdefault(key.name, (key, []))[1].append(name)
    yield from takers.values()


def _other_names() -> Iterator[str]:
    for key in KEYS:
        for name in (*key.aliases, *key.also):
            yield f"| `{name}` | `{key.name}` |"
    for legacy in LEGACY:
        yield f"| `{legacy.name}` | `{legacy.today}` |"
    yield '| `zero_optimization: true` | `zero_optimization: {"stage": 1}` |'
    yield "| `optimizer.params.max_grad_norm` | `gradient_clipping` |"


if __name__ == "__main__":
    sys.stdout.write(table())
