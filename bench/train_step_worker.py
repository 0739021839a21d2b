"""The processes that bench/train_step.py measures; each runs one role and writes one JSON file.

    tiermem    the training that is measured, in a memory cgroup of its own where permitted
    resident   the same training with every state on the device: the bits to agree with
    plain      plain PyTorch in memory: what a step computes, and its losses
    baseline   torch alone: the memory that is there before any model

The process moves into its cgroup before it imports torch, so that everything is counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SECTOR_BYTES = 512


class Memory:
    """The peak memory of this process tree: of its cgroup, else VmHWM."""

    def __init__(self, cgroup: str | None) -> None:
        self._peak_file: Path | None = None
        if cgroup is None:
            return
        directory = Path(cgroup)
        with contextlib.suppress(OSError):
            (directory / "cgroup.procs").write_text(str(os.getpid()))
            for name in ("memory.max_usage_in_bytes", "memory.peak"):
                if (directory / name).exists():
                    self._peak_file = directory / name

    def fields(self) -> dict[str, Any]:
        """``peak_memory_bytes``, where it comes from, and VmHWM."""
        high_water = 0
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                high_water = int(line.split()[1]) * 1024
        if self._peak_file is None:
            peak, source = high_water, "VmHWM"
        else:
            peak, source = int(self._peak_file.read_text()), f"cgroup {self._peak_file.name}"
        return {"peak_memory_bytes": peak, "peak_memory_source": source, "vm_hwm_bytes": high_water}


def device_counters(directory: str) -> tuple[int, int] | None:
    """Bytes (read, written) by the block device below ``directory``, by its own count."""
    number = os.stat(directory).st_dev
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    try:
        fields = path.read_text().split()
    except OSError:
        return None  # no block device of its own: btrfs, overlay, tmpfs, a network
    return int(fields[2]) * SECTOR_BYTES, int(fields[6]) * SECTOR_BYTES


def process_counters() -> tuple[int, int]:
    """Bytes (read, written) that this process caused on any block device, by the kernel's count."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def batches(spec: dict[str, Any]) -> Any:
    from tiermem.models.text import ByteText

    return ByteText().batches(spec["batch_size"], spec["sequence_length"], spec["seed"])


def model_config(spec: dict[str, Any]) -> Any:
    from tiermem.models.gpt import GPTConfig

    return GPTConfig(**spec["model"])


class Marks:
    """Wall-clock times of the phases of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._last = time.perf_counter()

    def begin(self) -> None:
        self.steps.append({})

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.steps[-1][phase] = now - self._last
        self._last = now


def run_tiermem(spec: dict[str, Any], memory: Memory) -> dict[str, Any]:
    """Train with tiermem; timings, bytes, peak memory, losses and a hash of the final states."""
    import torch

    import tiermem
    from tiermem.models.gpt import GPT, make_initializer

    with tiermem.Runtime(spec["config"]) as rt:
        with torch.device("meta"):
            model = GPT(model_config(spec))
        tiermem.shard(model, rt, init=make_initializer(spec["seed"]))
        optimizer = tiermem.optim.AdamW(
            model.parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
        marks, losses = Marks(), []
        begin = end = None
        for step, (tokens, targets) in zip(range(spec["total_steps"]), batches(spec), strict=False):
            if step == spec["total_steps"] - spec["steps"]:
                begin = _snapshot(rt, spec)
            marks.begin()
            loss = model(tokens.to(rt.device), targets.to(rt.device))
            losses.append(float_bits(float(loss.detach())))
            marks.end("forward")
            loss.backward()
            marks.end("backward")
            optimizer.step()
            optimizer.zero_grad()
            marks.end("optimizer")
        end = _snapshot(rt, spec)
        result = {"losses": losses, "marks": marks.steps, "begin": begin, "end": end}
        result |= memory.fields()
        rt.drain()
        stats = rt.stats()
        result["host_budget_bytes"] = stats.host.budget
        result["host_peak_bytes"] = stats.host.peak
        result["device_budget_bytes"] = stats.device.budget
        result["device_peak_bytes"] = stats.device.peak
        result["state_bytes"] = {name: dict(tiers) for name, tiers in stats.placement.items()}
        result["direct"] = stats.direct
        if spec["hash"]:
            result["state_hash"] = hash_states(model, optimizer)
    return result


def _snapshot(rt: Any, spec: dict[str, Any]) -> dict[str, Any]:
    stats = rt.stats()
    counters = device_counters(spec["directory"]) if spec["directory"] else None
    return {
        "time": time.perf_counter(),
        "read_bytes": stats.read_bytes,
        "written_bytes": stats.written_bytes,
        "stall_seconds": stats.stall_seconds,
        "device": counters,
        "process": process_counters(),
    }


def hash_states(model: Any, optimizer: Any) -> str:
    """One hash over the fp32 masters and both moments of every parameter, in their order."""
    import torch

    import tiermem

    digest = hashlib.blake2b(digest_size=16)
    states = optimizer.state_dict()["state"]
    for index, (name, parameter) in enumerate(model.named_parameters()):
        digest.update(name.encode())
        state = states[index]
        for tensor in (tiermem.full_master(parameter), state["exp_avg"], state["exp_avg_sq"]):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def run_plain(spec: dict[str, Any], memory: Memory) -> dict[str, Any]:
    """Plain PyTorch in memory; with ``spec["update"]`` a whole step, else forward and backward only."""
    import torch

    from tiermem.models.gpt import GPT, init_model
    from tiermem.models.reference import ReferenceTrainer, TrainOptions

    config = model_config(spec)
    if spec["update"]:
        trainer = ReferenceTrainer(config, TrainOptions(spec["precision"], seed=spec["seed"]))
        model, update = trainer.model, trainer.update
    else:
        dtype = torch.bfloat16 if spec["precision"] == "bf16" else torch.float32
        with torch.device("meta"):
            model = GPT(config).to(dtype)
        model = model.to_empty(device="cpu")
        init_model(model, spec["seed"])

        def update() -> None:
            model.zero_grad(set_to_none=True)

    marks, losses = Marks(), []
    activation_bytes = 0
    for step, (tokens, targets) in zip(range(spec["total_steps"]), batches(spec), strict=False):
        marks.begin()
        if step == 0:
            loss, activation_bytes = counted_forward(model, tokens, targets)
        else:
            loss = model(tokens, targets)
        losses.append(float_bits(float(loss.detach())))
        marks.end("forward")
        loss.backward()
        marks.end("backward")
        update()
        marks.end("optimizer")
    result = {"marks": marks.steps, "activation_bytes": activation_bytes}
    result["losses"] = losses if spec["update"] else None
    return result | memory.fields()


def counted_forward(model: Any, tokens: Any, targets: Any) -> tuple[Any, int]:
    """The loss, and the bytes of all that autograd keeps for the backward, parameters aside."""
    import torch

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, targets)
    return loss, sum(kept.values())


def run_baseline(spec: dict[str, Any], memory: Memory) -> dict[str, Any]:
    """torch with its libraries and thread pools in use, and next to no data."""
    import torch

    from tiermem.models.gpt import GPT, GPTConfig

    tiny = GPT(GPTConfig(1, 64, 1, 16)).to(torch.bfloat16)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    tiny(tokens, tokens).backward()
    return memory.fields()


ROLES = {"tiermem": run_tiermem, "resident": run_tiermem, "plain": run_plain, "baseline": run_baseline}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    memory = Memory(spec.get("cgroup"))
    result = ROLES[spec["role"]](spec, memory)
    Path(spec["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
