"""One rank of bench/comm_volume.py: trains under each of ``spec["cases"]`` and counts; see there."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import distributed as dist

import tiermem
from tiermem.comm import Kind
from tiermem.models.gpt import GPT, GPTConfig, make_initializer
from tiermem.types import Purpose, Tier

Piece = tuple[str, int, int]  # what, address, bytes


def interface_bytes() -> int:
    """What this machine, or network namespace, has sent to itself, by the interface's counter."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise OSError("no interface lo")


def batch(config: GPTConfig, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(config.vocab_size, (1, 33), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(spec: dict[str, Any], case: dict[str, Any], steps: int, rank: int) -> dict[str, Any]:
    """A run of ``steps`` steps, from its beginning to its end: exchanges and bytes, by kind."""
    gpt = GPTConfig(**spec["model"])
    before = interface_bytes()
    dist.barrier()
    with tiermem.Runtime(spec["config"] | case["config"]) as runtime:
        with torch.device("meta"):
            model = GPT(gpt)
        tiermem.shard(model, runtime, init=make_initializer(0))
        optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            for micro in range(case["micro_steps"]):
                model(*batch(gpt, rank, step * case["micro_steps"] + micro)).backward()
                if step == steps - 1 and micro == case["micro_steps"] - 2:
                    partial = sum(len_of(group.partial) for group in runtime.groups)
            if case["clip"]:
                optimizer.clip_grad_norm_(1.0)
            state = memory(runtime) if step == steps - 1 else {}
            optimizer.step()
            optimizer.zero_grad()
        peaks = peak_bytes(runtime)
        result = {"largest_group_bytes": max(group.nbytes for group in runtime.groups)}
        result["in_flight_bytes"] = sum(sorted((g.nbytes for g in runtime.groups), reverse=True)[:3])
        result["ahead_bytes"] = runtime.gather.room.ahead_bytes
        result["padded_numel"] = sum(r.layout.numel for g in runtime.groups for r in g.regions)
        (communicator,) = runtime.communicators
    if case["micro_steps"] > 1:
        state["accumulating_bytes"] = partial
    dist.barrier()
    stats = communicator.stats()
    return result | {
        "exchanges": {kind.name: stats.by_kind[kind].exchanges for kind in Kind},
        "sent_bytes": {kind.name: stats.by_kind[kind].sent_bytes for kind in Kind},
        "interface_bytes": interface_bytes() - before,
        "state": state,
        "peaks": peaks,
    }


def len_of(gradient: Any) -> int:
    return 0 if gradient is None else int(gradient.nbytes)


def pieces(runtime: Any) -> Iterator[Piece]:
    """Where every model state of this rank lies: taken from the objects that use it, not from the
    ledger."""
    for group in runtime.groups:
        if group.record is None or group.persistent:
            yield "parameters", group.lease.address, group.nbytes
        else:
            yield "parameters", runtime.store.view_address(group.record), group.record.nbytes
        for gradient in (group.gradient, group.partial):
            if gradient is not None:
                yield "gradients", gradient.tensor.data_ptr(), gradient.nbytes
        for region in group.regions:
            for state in region.states.values():
                yield "states", state.store.view_address(state.record), state.record.nbytes


def memory(runtime: Any) -> dict[str, Any]:
    """Bytes of model states after a backward, before the step; the pages behind them must be there and
    must not overlap. ``stray_bytes``: torch storages outside of the arenas."""
    runtime.pipeline.quiesce()
    found = sorted(pieces(runtime), key=lambda piece: piece[1])
    for (_, start, nbytes), (_, following, _) in itertools.pairwise(found):
        if start + nbytes > following:
            raise SystemExit("two model states overlap")
    result: dict[str, Any] = {
        what: sum(nbytes for name, _, nbytes in found if name == what)
        for what in ("parameters", "gradients", "states")
    }
    result["absent_bytes"] = sum(absent_bytes(start, nbytes) for _, start, nbytes in found)
    arenas = [arena for arena in (runtime.host, runtime.device_arena) if arena is not None]
    result["arena_resident_bytes"] = sum(resident_bytes(a.address, a.nbytes) for a in arenas)
    snapshot = runtime.ledger.snapshot()
    result["ledger_bytes"] = sum(snapshot.tiers[tier].used_bytes for tier in (Tier.HOST, Tier.DEVICE))
    result["ledger_peak_bytes"] = sum(
        snapshot.tiers[tier].peak_bytes for tier in (Tier.HOST, Tier.DEVICE)
    )
    result["stray_bytes"] = stray_bytes(arenas)
    return result


def absent_bytes(start: int, nbytes: int) -> int:
    """Of these bytes, those whose pages are not in memory, by the kernel's page map."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = start // page, (start + nbytes - 1) // page
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read((last - first + 1) * 8), dtype=np.uint64)
    return int((entries >> np.uint64(63) == 0).sum()) * page


def resident_bytes(start: int, nbytes: int) -> int:
    """The resident part of the mappings that begin in this range, by the kernel's count."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name = line.split(" ", 1)[0]
        if "-" in name and not name.endswith(":"):
            inside = start <= int(name.split("-")[0], 16) < start + nbytes
        elif inside and name == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def stray_bytes(arenas: list[Any]) -> int:
    """Storages that any tensor which the garbage collector knows keeps alive outside of ``arenas``."""
    gc.collect()
    seen: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            if not any(a.address <= storage.data_ptr() < a.address + a.nbytes for a in arenas):
                seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def peak_bytes(runtime: Any) -> dict[str, int]:
    """The most that parameters (gathered, and this rank's between uses) and gradients took at once."""
    tiers = runtime.ledger.snapshot().tiers
    gathered = tiers[Tier.DEVICE].by_purpose[Purpose.GATHER].peak_bytes
    kept = sum(group.record.nbytes for group in runtime.groups if group.record is not None)
    gradients = tiers[Tier.HOST].by_purpose[Purpose.GRADIENT].peak_bytes
    return {"parameters": gathered + kept, "gradients": gradients}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    results = [
        [train(spec, case, steps, rank) for steps in (spec["few_steps"], spec["more_steps"])]
        for case in spec["cases"]
    ]
    Path(spec["result"]).write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
