"""A store with what it needs, for the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tiermem.io import Engine
from tiermem.memory.arena import Arena, Block
from tiermem.memory.ledger import Ledger
from tiermem.store.records import Record
from tiermem.store.store import TieredStore
from tiermem.types import Purpose


@dataclass
class Bench:
    """A store with what it needs; buffers come from its arena."""

    engine: Engine
    arena: Arena
    ledger: Ledger
    store: TieredStore

    def buffer(self, data: bytes | int) -> Block:
        nbytes = data if isinstance(data, int) else len(data)
        block = self.arena.allocate(nbytes, Purpose.OPTIMIZER)
        assert block is not None
        if isinstance(data, bytes):
            block.view()[:] = data
        return block

    def put(self, record: Record, data: bytes, start: int = 0) -> None:
        block = self.buffer(data)
        self.store.write(record, start, start + len(data), block.address, block).wait()
        self.arena.free(block)

    def get(self, record: Record, start: int = 0, stop: int | None = None) -> bytes:
        stop = record.nbytes if stop is None else stop
        block = self.buffer(stop - start)
        self.store.read(record, start, stop, block.address, block).wait()
        data = bytes(block.view())
        self.arena.free(block)
        return data


MakeBench = Callable[..., Bench]
