"""How long the step of each optimizer takes, and what it keeps, on a sharded model and in plain torch.

The model is a stack of linear layers whose gradients are there already, so that a step is nothing but
the updates: `step()` and `Runtime.drain()` here, `step()` of the class itself over ordinary parameters
there. Parameters are fp32 on both sides and states lie in host memory (``--on nvme --path DIRECTORY``:
on a drive). In a round every optimizer takes one step, ours and torch's one after the other; reported
are medians over the rounds and ratios taken within a round.

    python bench/optimizers.py --params 20M --rounds 7

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import arguments as argument
import torch
from machine import facts
from torch import nn

import tiermem

WIDTH = 1024
Maker = Callable[[Any], Any]

OURS: dict[str, tuple[Maker, Maker | None]] = {
    "AdamW": (
        lambda p: tiermem.optim.AdamW(p, lr=1e-4),
        lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    ),
    "Adam": (
        lambda p: tiermem.optim.Adam(p, lr=1e-4, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-4, weight_decay=0.1, fused=True),
    ),
    "SGD": (
        lambda p: tiermem.optim.SGD(p, lr=1e-4, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, fused=True),
    ),
    "AdamW8bit": (lambda p: tiermem.optim.AdamW8bit(p, lr=1e-4), None),
    "Tiered(AdamW)": (
        lambda p: tiermem.optim.Tiered(torch.optim.AdamW, p, lr=1e-4),
        lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False),
    ),
    "Tiered(Adagrad)": (
        lambda p: tiermem.optim.Tiered(torch.optim.Adagrad, p, lr=1e-4),
        lambda p: torch.optim.Adagrad(p, lr=1e-4, foreach=False),
    ),
}


def make_model(params: int) -> nn.Module:
    torch.manual_seed(0)
    count = max(1, params // WIDTH**2)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)])


class Sharded:
    """A sharded model and its optimizer."""

    def __init__(self, model: nn.Module, make: Maker, where: dict[str, Any]) -> None:
        self.runtime = tiermem.Runtime({"device": "cpu", "params": "host", **where})
        self.model = tiermem.shard(model, self.runtime)
        self.optimizer = make(self.model.parameters())

    def step_seconds(self) -> float:
        for param in self.model.parameters():
            param.grad = torch.full(param.shape, 1e-3)
        self.runtime.drain()
        started = time.perf_counter()
        self.optimizer.step()
        self.runtime.drain()
        seconds = time.perf_counter() - started
        self.optimizer.zero_grad()
        return seconds

    def bytes_per_param(self) -> float:
        """Of all states."""
        kept = self.runtime.stats().placement
        total = sum(sum(tiers.values()) for name, tiers in kept.items() if name != "param")
        return total / sum(p.numel() for p in self.model.parameters())

    def close(self) -> None:
        self.runtime.close()


class Plain:
    """The same in torch alone."""

    def __init__(self, model: nn.Module, make: Maker) -> None:
        self.model = model
        self.optimizer = make(model.parameters())
        for param in model.parameters():
            param.grad = torch.full(param.shape, 1e-3)

    def step_seconds(self) -> float:
        started = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - started


@contextlib.contextmanager
def pair(name: str, params: int, where: dict[str, Any]) -> Iterator[tuple[Sharded, Plain | None]]:
    ours, theirs = OURS[name]
    sharded = Sharded(make_model(params), ours, where)
    try:
        yield sharded, None if theirs is None else Plain(make_model(params), theirs)
    finally:
        sharded.close()


def spread(values: list[float]) -> list[float]:
    """Median, least, most."""
    return [round(f(values), 3) for f in (statistics.median, min, max)]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    where: dict[str, Any] = {"optimizer": arguments.on}
    if arguments.on == "nvme":
        where |= {"paths": [str(arguments.path)], "resident_memory": 0}
    found: dict[str, Any] = {}
    for name in OURS:
        with pair(name, arguments.params, where) as (sharded, plain):
            rounds = []
            for _ in range(arguments.rounds + 1):
                theirs = plain.step_seconds() if plain is not None else None
                time.sleep(0.2)  # torch's threads spin for a while
                rounds.append((sharded.step_seconds(), theirs))
            rounds = rounds[1:]  # states are made in the first
            found[name] = {
                "seconds": spread([ours for ours, _ in rounds]),
                "bytes_per_param": round(sharded.bytes_per_param(), 3),
            }
            if plain is not None:
                found[name]["over_torch"] = spread([a / b for a, b in rounds if b is not None])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=argument.count, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--on", choices=("host", "nvme"), default="host")
    parser.add_argument("--path", type=Path, default=Path("."))
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    arguments = parser.parse_args()
    found = measure(arguments)
    if not arguments.json:
        for name, row in found.items():
            print(f"{name:16} {row['seconds'][0] * 1e3:8.1f} ms", row.get("over_torch", ""), flush=True)
    result = {"params": arguments.params, "on": arguments.on, "optimizers": found, **facts()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
