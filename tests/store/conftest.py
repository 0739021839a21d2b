"""Engines, arenas and stores for the tests of the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from store_bench import Bench, MakeBench

from tiermem.errors import ConfigError
from tiermem.io import open_engine
from tiermem.memory.arena import Arena
from tiermem.memory.ledger import Ledger
from tiermem.store.store import TieredStore
from tiermem.types import Tier


@pytest.fixture(params=["threads", "libaio", "io_uring", "native_threads"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_bench(tmp_path: Path, backend: str, mount: Callable[..., Path]) -> Iterator[MakeBench]:
    """Makes stores that are closed, with their engine and arena, at the end of the test.

    Depends on ``mount`` only to be torn down before it.
    """
    made: list[Bench] = []

    def make(
        num_paths: int = 2,
        host_bytes: int = 64 << 20,
        paths: Sequence[Path] | None = None,
        **options: Any,
    ) -> Bench:
        if paths is None:
            paths = [tmp_path / f"drive{at}" for at in range(num_paths)]
            for path in paths:
                path.mkdir(exist_ok=True)
        try:
            engine = open_engine(backend)
        except ConfigError as error:
            pytest.skip(str(error))
        ledger = Ledger({Tier.HOST: host_bytes})
        arena = Arena(host_bytes, tier=Tier.HOST, ledger=ledger, pin=False)
        try:
            store = TieredStore(engine, arena, paths=paths, **options)
        except BaseException:
            engine.close()
            arena.close()
            raise
        made.append(Bench(engine, arena, ledger, store))
        return made[-1]

    yield make
    for bench in made:
        bench.store.close()
        bench.engine.close()
        bench.arena.close(force=True)


@pytest.fixture
def python_env() -> dict[str, str]:
    """The environment for a subprocess that imports tiermem from this checkout."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
