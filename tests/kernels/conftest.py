from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiermem.kernels import Kernels, available_kernels, open_kernels

NATIVE = available_kernels()[:-1]


@pytest.fixture(scope="session")
def opened() -> Iterator[dict[str, Kernels]]:
    """All kernels of this machine by name, best first; ``torch`` is the last."""
    kernels = {
        name: open_kernels(name, num_threads=None if name == "torch" else 3)
        for name in available_kernels()
    }
    yield kernels
    for each in kernels.values():
        each.close()


@pytest.fixture(scope="session")
def native(opened: dict[str, Kernels]) -> dict[str, Kernels]:
    if not NATIVE:
        pytest.skip("the native core is not built")
    return {name: opened[name] for name in NATIVE}


@pytest.fixture(scope="session")
def best(opened: dict[str, Kernels]) -> Kernels:
    return next(iter(opened.values()))
