"""The example in docs/io.md runs as it stands, but for the directory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def test_example(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "io.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert "/local_nvme" in example
    names: dict[str, object] = {}
    exec(example.replace("/local_nvme", str(tmp_path)).replace("1 << 30", "1 << 27"), names)
    blocks, back = names["blocks"], names["back"]
    assert isinstance(blocks, list)
    assert isinstance(back, list)
    assert all(np.array_equal(one, other) for one, other in zip(blocks, back, strict=True))
