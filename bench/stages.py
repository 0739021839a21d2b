"""How long a step takes at each ZeRO stage, and how much memory: against torch's own, in memory.

    python bench/stages.py --params 134M --json

Contenders, each on two gloo ranks (``--ranks``) of this machine, in fresh processes, in turn, the order
reversed in every other round:

    stage0 .. stage3   tiermem
    ddp                DistributedDataParallel
    fsdp2              fully_shard of each block
    ddp_bf16, fsdp2_bf16   the same without masters and with moments in bf16: less work, and another
                       result; the least that torch's own can take
    plain              no ranks: one process with all processors, on the batch of all ranks together
    loopback           no training: how fast two ranks exchange bytes while nothing else runs

All train one GPT on the same text from the same values: bf16 parameters, gradients exchanged in bf16,
fp32 masters and moments, AdamW (torch's is the fused one). The first losses must agree. Seconds are
the slower rank's, with a barrier before each step; ratios are taken within a round, of the medians
(``..._processor``: of the processor seconds of all ranks, which other work on the machine disturbs
less).
Memory is the peak resident set of a rank while it trains (setting up is not counted for anybody).

The floor of a step on two ranks that share the processors is what plain needs, and the bytes that the
stage has to move, at the speed of ``loopback``: sending costs processor time here, so that it hides
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arguments as argument
from launch import launch
from machine import facts, unwind_on_sigterm

from tiermem.models.gpt import GPTConfig

HERE = Path(__file__).resolve().parent
CONTENDERS = (
    "stage0",
    "ddp",
    "stage1",
    "ddp_bf16",
    "stage2",
    "fsdp2_bf16",
    "stage3",
    "fsdp2",
    "plain",
    "loopback",
)
RATIOS = {
    "stage0_over_ddp": ("stage0", "ddp"),
    "stage1_over_ddp": ("stage1", "ddp"),
    "stage2_over_ddp": ("stage2", "ddp"),
    "stage3_over_fsdp2": ("stage3", "fsdp2"),
    "stage2_over_ddp_bf16": ("stage2", "ddp_bf16"),
    "stage3_over_fsdp2_bf16": ("stage3", "fsdp2_bf16"),
}
VOLUME = {"stage0": 2, "stage1": 2, "stage2": 2, "stage3": 3}  # elements moved, in parameters
LOSS_TOLERANCE = 0.02


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--params", type=argument.count, default=argument.count("134M"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1, help="of each rank")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="timed in each round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTENDERS), help="some of the contenders")
    parser.add_argument("--config", type=json.loads, default={}, help="tiermem's, in JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    unknown = set(arguments.only) - set(CONTENDERS)
    if unknown:
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    if min(arguments.rounds, arguments.steps, arguments.warmup) < 1 or arguments.ranks < 2:
        parser.error("--rounds, --steps and --warmup are at least 1, --ranks 2")
    return arguments


def run_contender(name: str, arguments: argparse.Namespace, model: GPTConfig) -> dict[str, Any]:
    """One contender of one round: the slower rank's seconds, the larger rank's memory."""
    spec = {
        "contender": name,
        "model": asdict(model),
        "batch_size": arguments.batch_size,
        "sequence_length": arguments.sequence_length,
        "ranks": arguments.ranks,
        "warmup": arguments.warmup,
        "steps": arguments.steps,
        "seed": arguments.seed,
        "config": arguments.config,
    }
    size = 1 if name == "plain" else arguments.ranks
    threads = max(1, (os.cpu_count() or 1) // size)
    ranks = launch(HERE / "stages_worker.py", spec, size, threads=threads)
    steps = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    last = ranks[0]["end"]
    result = {
        "step_s": statistics.median(steps),
        "peak_rss_bytes": max(rank["peak_rss_bytes"] for rank in ranks),
        "processor_s": sum(statistics.median(rank["processor_s"]) for rank in ranks),
        "loss": statistics.mean(rank["losses"][0] for rank in ranks),
        "last_loss": statistics.mean(rank["losses"][-1] for rank in ranks),
    }
    for key in ("stall_s", "update_s", "sent_bytes", "exchanges"):
        if key in last:
            result[key] = (last[key] - ranks[0]["begin"][key]) / arguments.steps
    for key in ("device_peak_bytes", "host_peak_bytes", "nbytes", "kernels"):
        if key in last:
            result[key] = last[key]
    if not arguments.json:
        print(f"{name}: {json.dumps(result)}", flush=True)
    return result


def check_losses(found: dict[str, dict[str, Any]]) -> None:
    """All contenders have trained the same model on the same data."""
    losses = {name: each["loss"] for name, each in found.items() if name != "loopback"}
    if losses and max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * max(losses.values()):
        raise SystemExit(f"the first losses differ: {losses}")


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
    }


def summary(rounds: list[dict[str, dict[str, Any]]], model: GPTConfig, ranks: int) -> dict[str, Any]:
    """Medians over the rounds, of ratios within a round."""
    report: dict[str, Any] = {}
    for name in rounds[0]:
        each = [found[name] for found in rounds]
        report[name] = {
            key: statistics.median(values) if isinstance(values[0], (int, float)) else values[0]
            for key in each[0]
            for values in [[one[key] for one in each]]
        }
    for field, (ours, theirs) in RATIOS.items():
        if ours in rounds[0] and theirs in rounds[0]:
            values = [found[ours]["step_s"] / found[theirs]["step_s"] for found in rounds]
            report[field], report[field + "_spread"] = statistics.median(values), spread(values)
            report[field + "_processor"] = statistics.median(
                found[ours]["processor_s"] / found[theirs]["processor_s"] for found in rounds
            )
    for field, (ours, theirs) in (
        ("rss_over_fsdp2", ("stage3", "fsdp2")),
        ("stage0_rss_over_ddp", ("stage0", "ddp")),
        ("stage2_rss_over_ddp", ("stage2", "ddp")),
    ):
        if ours in rounds[0] and theirs in rounds[0]:
            report[field] = statistics.median(
                found[ours]["peak_rss_bytes"] / found[theirs]["peak_rss_bytes"] for found in rounds
            )
    if "plain" in rounds[0] and "loopback" in rounds[0]:
        loop = report["loopback"]
        bytes_per_s = loop["nbytes"] * (ranks - 1) / loop["step_s"]
        report["loopback_gb_per_s"] = bytes_per_s / 1e9
        for name in VOLUME.keys() & rounds[0].keys():
            moved = VOLUME[name] * model.num_parameters * 2 * (ranks - 1) / ranks
            floor = report["plain"]["step_s"] + moved / bytes_per_s
            report[name]["floor_s"] = floor
            report[name]["floor_over_step"] = floor / report[name]["step_s"]
    return report


def main() -> None:
    arguments = parse_arguments()
    unwind_on_sigterm()
    model = GPTConfig.for_parameters(arguments.params)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(arguments.rounds):
        order = arguments.only if number % 2 == 0 else arguments.only[::-1]
        rounds.append({name: run_contender(name, arguments, model) for name in order})
        check_losses(rounds[-1])
    report = summary(rounds, model, arguments.ranks) | {
        "parameters": model.num_parameters,
        "model": asdict(model),
        "ranks": arguments.ranks,
        "batch": [arguments.batch_size, arguments.sequence_length],
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "config": arguments.config,
        **facts(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
