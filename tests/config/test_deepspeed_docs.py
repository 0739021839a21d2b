"""docs/deepspeed.md has the table that the code prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiermem.config.deepspeed_key import Role
from tiermem.config.deepspeed_keys import KEYS, LEGACY
from tiermem.config.deepspeed_named import OPTIMIZERS, SCHEDULERS
from tiermem.config.deepspeed_table import BEGIN, END, table


def test_the_documentation_has_the_table_of_the_code(repository: Path) -> None:
    text = (repository / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    printed = BEGIN + text.partition(BEGIN)[2].partition(END)[0] + END + "\n"
    assert printed == table(), "print it again: python -m tiermem.config.deepspeed_table"


def test_the_module_prints_it(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tiermem.config.deepspeed_table"],
        capture_output=True,
        text=True,
        cwd=repository,
        timeout=60,
        check=True,
    )
    assert done.stdout == table()


def test_every_key_and_every_name_is_in_it() -> None:
    rows = table().splitlines()
    for key in KEYS:
        (row,) = _rows_of(rows, key.block, key.last)
        assert key.here in row.replace("\\|", "|")
        assert (key.role.value if key.role is not Role.REFUSED else "refused") in row
        for name in (*key.aliases, *key.also):
            assert f"| `{name}` | `{key.name}` |" in rows
    for legacy in LEGACY:
        assert f"| `{legacy.name}` | `{legacy.today}` |" in rows
    for types in (OPTIMIZERS, SCHEDULERS):
        for name, keys in types.items():
            for key in keys:
                (row,) = _rows_of(rows, key.block, key.last)
                assert name in row


def _rows_of(rows: list[str], block: str, last: str) -> list[str]:
    title = f"### `{block}`" if block else "### Top level"
    start = rows.index(title) + 1
    end = next(at for at in range(start, len(rows)) if rows[at].startswith("### "))
    return [row for row in rows[start:end] if row.startswith(f"| `{last}` |")]
