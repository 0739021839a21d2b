"""One rank of bench/partition.py: gathers every group of a sharded model again and again."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed as dist

import tiermem
from tiermem.models.gpt import GPT, GPTConfig, make_initializer


def gather_pass(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Every group once, in order, each given up for later ones."""
    with torch.no_grad():
        model(tokens)


def run(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    config = spec["config"] | {"paths": [spec["paths"][rank]]}
    with tiermem.Runtime(config) as runtime:
        with torch.device("meta"):
            model = GPT(GPTConfig(**spec["model"]))
        tiermem.shard(model, runtime, init=make_initializer(0))
        tiermem.optim.AdamW(model.parameters(), lr=1e-3)  # its states lie on the same path
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        gather_pass(model, tokens)
        gather_pass(model, tokens)  # from here on the order is known
        runtime.drain()
        before = runtime.stats()
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        for _ in range(spec["passes"]):
            gather_pass(model, tokens)
        seconds = time.perf_counter() - started
        after = runtime.stats()
        return {
            "seconds": seconds,
            "read_bytes": after.read_bytes - before.read_bytes,
            "whole_bytes": sum(group.nbytes for group in runtime.groups if not group.persistent),
            "direct": after.direct,
            "backend": after.backend,
        }


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    result = run(spec, rank)
    Path(spec["result"]).write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
