"""What each ZeRO stage moves and keeps, counted: elements per step and bytes of model states per rank.

    python bench/comm_volume.py --json

Volume. A collective on P elements (an all-gather, or a reduction to the owners) moves P (W - 1) / W of
them out of each of W ranks. Volumes are given in such collectives over all parameters, so that stages
1 and 2 move 2 of them, stage 3 moves 3, by whatever number of ranks. Counted by tiermem/comm, for
the parameters' and the gradients' exchanges: runs of two lengths, from start to end, differ by whole
steps.
``interface_over_counted``: what the network interface has sent in the longer run, headers, set-up and
all, over what was counted; in a network namespace of the run's own where that is permitted.

Stage 3 moves 3 if a group's parameters are given up between forward and backward (``max_reuse_numel``
0, as here for the count); by default groups are kept while there is room, and it moves less
(``stage3_kept_volume_over_psi``). With A micro-steps: 2 at stages 0 and 1 (A declared: they reduce
in the last backward, in fp32), A + 1 at stage 2, 3 A at stage 3.

Model states, in bytes per parameter, with N ranks: parameters and gradients in bf16, 2 each, and K = 10
for AdamW with split masters (the master's lower half 2, two moments 4 each; its upper half is the
parameter). Measured after a backward, before the step, as the sum of all buffers that hold model
states, found through the objects that use them; they must not overlap and each of their pages
must be in memory (``absent_bytes`` 0). ``stray_bytes``: torch's storages outside of the arenas.
Without accumulation stage 1 reduces and frees gradients as they come, as stage 2 does, and keeps no
more: ``stage1_state_over_formula`` is against what it does keep, 2 + (2 + K) / N, and
``stage1_state_over_4psi`` against 4 + K / N. With accumulation it keeps all of them, in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arguments as argument
from launch import launch
from machine import facts, unwind_on_sigterm
from namespace import network_namespace

from tiermem.models.gpt import GPTConfig

HERE = Path(__file__).resolve().parent
PARAM, GRADIENT, K, WIDE = 2, 2, 10, 4
VOLUME = {0: 2, 1: 2, 2: 2, 3: 3}
FEW_STEPS, MORE_STEPS = 4, 6
MICRO_STEPS = 3
STATE_FORMULA = {  # bytes per parameter on each of n ranks
    0: lambda n: PARAM + GRADIENT + K,
    1: lambda n: PARAM + (GRADIENT + K) / n,
    2: lambda n: PARAM + (GRADIENT + K) / n,
    3: lambda n: (PARAM + GRADIENT + K) / n,
}


def cases() -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for stage in range(4):
        config: dict[str, Any] = {"stage": stage, "optimizer": "device"}
        if stage == 3:
            result["stage3_kept"] = {"config": config, "micro_steps": 1, "clip": False}
            config = config | {"max_reuse_numel": 0}
        result[f"stage{stage}"] = {"config": config, "micro_steps": 1, "clip": False}
        result[f"stage{stage}_clipped"] = {"config": config, "micro_steps": 1, "clip": True}
        declared = config | {"gradient_accumulation_steps": MICRO_STEPS}
        result[f"stage{stage}_micro"] = {"config": declared, "micro_steps": MICRO_STEPS, "clip": False}
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--params", type=argument.count, default=argument.count("20M"))
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4])
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    arguments = parser.parse_args()
    if min(arguments.ranks) < 2:
        parser.error("--ranks are at least 2")
    return arguments


def per_step(runs: list[dict[str, Any]], what: str, kind: str) -> float:
    few, more = (run[what][kind] for run in runs)
    return float(more - few) / (MORE_STEPS - FEW_STEPS)


def volume(name: str, runs: list[dict[str, Any]], psi: int, ranks: int) -> float:
    """Collectives on all parameters that one rank's traffic of a step amounts to."""
    wide = name.endswith("_micro") and int(name[5]) < 2
    elements = per_step(runs, "sent_bytes", "PARAMS") / PARAM
    elements += per_step(runs, "sent_bytes", "GRADIENTS") / (WIDE if wide else GRADIENT)
    return elements / (psi * (ranks - 1) / ranks)


def volume_fields(found: dict[str, list[Any]], psi: int, ranks: int) -> dict[str, Any]:
    """``found``: by case, by rank, both runs."""
    fields: dict[str, Any] = {}
    for name, by_rank in found.items():
        moved = max(volume(name, runs, psi, ranks) for runs in by_rank)
        stage = int(name[5])
        if name == "stage3_kept":
            fields["stage3_kept_volume_over_psi"] = moved
        elif name.endswith("_micro"):
            expected = {2: MICRO_STEPS + 1, 3: 3 * MICRO_STEPS}.get(stage, 2)
            fields[f"stage{stage}_micro_steps_volume_over_{expected}psi"] = moved / expected
        elif name.endswith("_clipped"):
            plain = found[f"stage{stage}"][0]
            kinds = by_rank[0][0]["exchanges"]
            more = {
                kind: per_step(by_rank[0], "exchanges", kind) - per_step(plain, "exchanges", kind)
                for kind in kinds
            }
            fields[f"stage{stage}_clipping_adds"] = {kind: n for kind, n in more.items() if n}
        else:
            fields[f"stage{stage}_volume_over_{VOLUME[stage]}psi"] = moved / VOLUME[stage]
        counted = sum(sum(runs[1]["sent_bytes"].values()) for runs in by_rank)
        seen = max(runs[1]["interface_bytes"] for runs in by_rank)
        fields.setdefault("interface_over_counted", {})[name] = seen / counted
    return fields


def state_fields(found: dict[str, list[Any]], psi: int, ranks: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, by_rank in found.items():
        states = [runs[1]["state"] for runs in by_rank]
        stage = int(name[5])
        most = max(sum(s[w] for w in ("parameters", "gradients", "states")) for s in states)
        if name == f"stage{stage}":
            fields[f"{name}_state_over_formula"] = most / (STATE_FORMULA[stage](ranks) * psi)
            fields[f"{name}_state_bytes_per_parameter"] = most / psi
        if name == "stage1":
            fields["stage1_state_over_4psi"] = most / ((PARAM + GRADIENT + K / ranks) * psi)
        if name.endswith("_micro"):
            kept = max(s["accumulating_bytes"] for s in states) / psi
            fields[f"{name}_accumulating_bytes_per_parameter"] = kept
        fields.setdefault("absent_bytes", {})[name] = max(s["absent_bytes"] for s in states)
        fields.setdefault("stray_bytes", {})[name] = max(s["stray_bytes"] for s in states)
        fields.setdefault("arena_resident_over_ledger_peak", {})[name] = max(
            s["arena_resident_bytes"] / s["ledger_peak_bytes"] for s in states
        )
    return fields | peak_fields(found, psi, ranks)


def peak_fields(found: dict[str, list[Any]], psi: int, ranks: int) -> dict[str, Any]:
    """Peaks over their bounds: parameters at stage 3 at most Psi / N, the largest group and what is
    fetched ahead; gradients at stage 2 at most Psi / N and what is being reduced."""
    fields: dict[str, Any] = {}
    for runs in found["stage3"]:
        run = runs[1]
        bound = PARAM * run["padded_numel"] / ranks + run["largest_group_bytes"] + run["ahead_bytes"]
        ratio = run["peaks"]["parameters"] / bound
        fields["stage3_peak_param_over_bound"] = max(
            ratio, fields.get("stage3_peak_param_over_bound", 0)
        )
    for runs in found["stage2"]:
        run = runs[1]
        # Each of those in flight: this rank's partial gradients, and the others' parts of its own.
        bound = GRADIENT * run["padded_numel"] / ranks + 2 * run["in_flight_bytes"]
        ratio = run["peaks"]["gradients"] / bound
        fields["stage2_peak_gradient_over_bound"] = max(
            ratio, fields.get("stage2_peak_gradient_over_bound", 0)
        )
    return fields


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = GPTConfig.for_parameters(arguments.params, context=128)
    every = cases()
    spec = {
        "model": asdict(model),
        "cases": list(every.values()),
        "few_steps": FEW_STEPS,
        "more_steps": MORE_STEPS,
        "config": {
            "device": "cpu",
            "compute_dtype": "bf16",
            "persistence_threshold_numel": 0,
            "host_memory": "512MiB",
        },
    }
    report: dict[str, Any] = {}
    with network_namespace() as prefix:
        report["interface"] = "lo" if prefix is None else "lo of a network namespace of its own"
        for ranks in arguments.ranks:
            threads = max(1, (os.cpu_count() or 1) // ranks)
            command = prefix or ()
            by_rank = launch(
                HERE / "comm_volume_worker.py", spec, ranks, threads=threads, prefix=command
            )
            found = {name: [rank[i] for rank in by_rank] for i, name in enumerate(every)}
            psi = model.num_parameters
            of_ranks = volume_fields(found, psi, ranks) | state_fields(found, psi, ranks)
            report[f"ranks_{ranks}"] = of_ranks
            if not arguments.json:
                print(f"{ranks} ranks: {json.dumps(of_ranks, indent=1)}", flush=True)
    first = report[f"ranks_{arguments.ranks[0]}"]
    report |= {key: first[key] for key in first if "_over_" in key and isinstance(first[key], float)}
    return report | {"parameters": model.num_parameters, "model": asdict(model)}


def main() -> None:
    arguments = parse_arguments()
    unwind_on_sigterm()
    report = measure(arguments) | facts()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
