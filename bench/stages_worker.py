"""One rank of what bench/stages.py compares; see there.

All train the same GPT from the same values on the same text: bf16 parameters and gradients, fp32
masters and moments. Everything is in memory.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed as dist

from tiermem.models.gpt import GPT, GPTConfig, init_model, make_initializer
from tiermem.models.reference import ReferenceTrainer, TrainOptions
from tiermem.models.text import ByteText

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]


class Tiermem:
    """Stage ``spec["stage"]`` of tiermem."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import tiermem

        stage = spec["stage"]
        config = {
            "stage": stage,
            "params": "host" if stage == 3 else "device",
            "optimizer": "device",
            "device": "cpu",
            "compute_dtype": "bf16",
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0,
        } | spec["config"]
        self.runtime = tiermem.Runtime(config)
        with torch.device("meta"):
            self.model = GPT(GPTConfig(**spec["model"]))
        tiermem.shard(self.model, self.runtime, init=make_initializer(spec["seed"]))
        self.optimizer = tiermem.optim.AdamW(self.model.parameters(), **ADAMW)

    def step(self, batch: Batch) -> float:
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def facts(self) -> dict[str, Any]:
        """Counters since the beginning."""
        stats = self.runtime.stats()
        traffic = [comm.stats() for comm in self.runtime.communicators]
        return {
            "stall_s": stats.stall_seconds,
            "update_s": stats.update_seconds,
            "sent_bytes": sum(each.sent_bytes for each in traffic),
            "exchanges": sum(each.exchanges for each in traffic),
            "device_peak_bytes": stats.device.peak,
            "host_peak_bytes": stats.host.peak,
            "kernels": stats.kernels,
        }

    def close(self) -> None:
        self.runtime.close()


class Plain:
    """One process, no ranks: what the machine needs for the arithmetic. ``ddp``: torch's
    DistributedDataParallel around the same."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.trainer = ReferenceTrainer(
            GPTConfig(**spec["model"]),
            TrainOptions(
                learning_rate=ADAMW["lr"],
                betas=ADAMW["betas"],
                eps=ADAMW["eps"],
                weight_decay=ADAMW["weight_decay"],
                seed=spec["seed"],
            ),
        )
        if spec["contender"] == "ddp":
            self.trainer.model = torch.nn.parallel.DistributedDataParallel(
                self.trainer.model, gradient_as_bucket_view=True
            )

    def step(self, batch: Batch) -> float:
        return self.trainer.step(batch)

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class _Torch:
    """A wrapped model with torch's fused AdamW."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: Batch) -> float:
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class PureDDP(_Torch):
    """DistributedDataParallel around a bf16 model; moments in bf16, no masters."""

    def __init__(self, spec: dict[str, Any]) -> None:
        model = GPT(GPTConfig(**spec["model"]))
        init_model(model, spec["seed"])
        model.to(torch.bfloat16)
        self.model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)


class FSDP2(_Torch):
    """`fully_shard` on each block and on the rest; parameters are fp32 shards (with ``_bf16``: bf16,
    and so are the moments), gathered and reduced in bf16, updated by torch's fused AdamW."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = GPT(GPTConfig(**spec["model"]))
        init_model(model, spec["seed"])
        if spec["contender"].endswith("_bf16"):
            model.to(torch.bfloat16)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


class Loopback:
    """Not training: both ranks send each other 32 MiB at once, ``step`` after step."""

    nbytes = 32 << 20

    def __init__(self, spec: dict[str, Any]) -> None:
        from tiermem.comm import Kind, Message, open_communicator

        self.comm = open_communicator(None)
        self.message = Message(Kind.SETUP, 0, "loopback")
        self.ours = [torch.ones(self.nbytes, dtype=torch.uint8) for _ in range(self.comm.size)]
        self.theirs = [torch.ones(self.nbytes, dtype=torch.uint8) for _ in range(self.comm.size)]

    def step(self, batch: Batch) -> float:
        self.comm.exchange(self.message, self.ours, self.theirs).wait()
        return 0.0

    def facts(self) -> dict[str, Any]:
        return {"nbytes": self.nbytes}

    def close(self) -> None:
        self.comm.close()


def make(spec: dict[str, Any]) -> Any:
    if spec["contender"].startswith("stage"):
        return Tiermem(spec | {"stage": int(spec["contender"][-1])})
    kinds = {
        "plain": Plain,
        "ddp": Plain,
        "ddp_bf16": PureDDP,
        "fsdp2": FSDP2,
        "fsdp2_bf16": FSDP2,
        "loopback": Loopback,
    }
    return kinds[spec["contender"]](spec)


def batches(spec: dict[str, Any], rank: int, size: int) -> Iterator[Batch]:
    """A rank's rows of the global batch, so that every contender sees the same."""
    rows = spec["batch_size"]
    for tokens, targets in ByteText().batches(
        rows * spec["ranks"], spec["sequence_length"], spec["seed"]
    ):
        mine = slice(0, None) if size == 1 else slice(rank * rows, (rank + 1) * rows)
        yield tokens[mine].contiguous(), targets[mine].contiguous()


def forget_peak() -> None:
    """Peaks from here on: what setting up has left is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def run(spec: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    contender = make(spec)
    forget_peak()
    losses, seconds, processor = [], [], []
    begin: dict[str, Any] = {}
    for number, batch in zip(
        range(spec["warmup"] + spec["steps"]), batches(spec, rank, size), strict=False
    ):
        if number == spec["warmup"]:
            begin = contender.facts()
        if size > 1:
            dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        losses.append(contender.step(batch))
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    result = {
        "losses": losses,
        "step_s": seconds[spec["warmup"] :],
        "processor_s": processor[spec["warmup"] :],
        "peak_rss_bytes": status_bytes("VmHWM"),
        "begin": begin,
        "end": contender.facts(),
    }
    contender.close()
    return result


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    result = run(spec, rank, size)
    Path(spec["result"]).write_text(json.dumps(result), encoding="utf-8")
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
