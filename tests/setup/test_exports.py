"""Names that people know from DeepSpeed are found where they look for them, and cost nothing before."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import tiermem
import tiermem.zero


@pytest.mark.parametrize("name", tiermem.zero.__all__)
def test_a_name_is_found_in_both_places(name: str) -> None:
    found = getattr(tiermem.zero, name)
    assert getattr(tiermem, name) is found
    assert name in dir(tiermem.zero)
    assert name in dir(tiermem)
    assert found.__module__.startswith("tiermem.")
    assert getattr(importlib.import_module(found.__module__), name) is found


def test_the_packages_are_light() -> None:
    code = (
        "import tiermem as deepspeed, tiermem.zero, sys; deepspeed.zero.__all__;"
        "assert not {'torch', 'pydantic'} & set(sys.modules);"
        "from tiermem.zero import Init; assert 'torch' in sys.modules; deepspeed.zero.Init"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match=r"'tiermem\.zero' has no attribute 'Inid'"):
        tiermem.zero.Inid  # noqa: B018
