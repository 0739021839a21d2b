"""ZeRO-Offload on an accelerator: what crosses the bus, and how long a step takes.

    python bench/gpu.py --params 350M --json

Stage 2: parameters on the accelerator, optimizer states in host memory and updated there (Ren et al.,
"ZeRO-Offload", ATC '21). Per parameter and step 2 bytes (its bf16 gradient) come down and 2 (its new
value) go up; counted here from torch's profiler as copied bytes, for whole steps. ``step_s`` is
compared with the states in plain PyTorch on the accelerator, where they fit. Without an
accelerator it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arguments as argument
import torch
from machine import facts

import tiermem
from tiermem.models.gpt import GPT, GPTConfig, make_initializer
from tiermem.models.reference import ReferenceTrainer, TrainOptions
from tiermem.models.text import ByteText

Batch = tuple[torch.Tensor, torch.Tensor]
DOWN, UP = "DtoH", "HtoD"  # as the profiler names copies


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--params", type=argument.count, default=argument.count("350M"))
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    return parser.parse_args()


def why_not() -> str:
    """Why nothing can be measured; empty if it can."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return "torch finds no accelerator here"
    return "" if found.type == "cuda" else f"copies are counted on CUDA devices only, not {found.type}"


def copied_bytes(step: Any, batch: Batch) -> dict[str, int]:
    """Bytes that one step copies down and up, from the profiler's events of copies."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(batch)
        torch.accelerator.synchronize()
    total = {DOWN: 0, UP: 0}
    trace = Path(f"/tmp/tiermem-gpu-{os.getpid()}.json")
    try:
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    finally:
        trace.unlink(missing_ok=True)
    for event in events:
        for way in total:
            if event.get("cat") == "gpu_memcpy" and way in event.get("name", ""):
                total[way] += int(event["args"]["bytes"])
    return total


def timed(step: Any, batches: list[Batch], warmup: int) -> float:
    seconds = []
    for batch in batches:
        torch.accelerator.synchronize()
        started = time.perf_counter()
        step(batch)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warmup:])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    reason = why_not()
    if reason:
        return {"skipped": reason}
    model = GPTConfig.for_parameters(arguments.params)
    text = ByteText().batches(arguments.batch_size, arguments.sequence_length, 0)
    batches = [next(text) for _ in range(arguments.warmup + arguments.steps)]
    report: dict[str, Any] = {"parameters": model.num_parameters, "model": asdict(model)}
    report["device"] = torch.cuda.get_device_name()
    config = {
        "stage": 2,
        "optimizer": "host",
        "device": "cuda",
        "compute_dtype": "bf16",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,
    }
    with tiermem.Runtime(config) as runtime:
        with torch.device("meta"):
            gpt = GPT(model)
        tiermem.shard(gpt, runtime, init=make_initializer(0))
        optimizer = tiermem.optim.AdamW(gpt.parameters(), lr=3e-4)

        def step(batch: Batch) -> None:
            gpt(*(each.to(runtime.device) for each in batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        report["step_s"] = timed(step, batches, arguments.warmup)
        moved = copied_bytes(step, batches[0])
    report["down_bytes_per_parameter"] = moved[DOWN] / model.num_parameters
    report["up_bytes_per_parameter"] = moved[UP] / model.num_parameters
    trainer = ReferenceTrainer(model, TrainOptions(), "cuda")
    report["plain_step_s"] = timed(trainer.step, batches, arguments.warmup)
    report["over_plain"] = report["step_s"] / report["plain_step_s"]
    return report


def main() -> None:
    arguments = parse_arguments()
    report = measure(arguments) | facts()
    if not arguments.json:
        print("\n".join(f"{key}: {value}" for key, value in report.items()))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
