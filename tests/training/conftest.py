"""Directories for NVMe paths, and checks after every test of training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from training_rig import make_paths


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """The tensors here are too small for several threads, which would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def drives(tmp_path: Path) -> Callable[[int], list[str]]:
    """``drives(n)`` makes n empty directories."""
    return lambda count: make_paths(tmp_path, count)


@pytest.fixture
def python_env() -> dict[str, str]:
    """The environment for a subprocess that imports tiermem and the helpers from this checkout."""
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": f"{here.parents[1]}{os.pathsep}{here}"}
