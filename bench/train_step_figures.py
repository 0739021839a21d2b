"""The figures of bench/train_step.py: times, floors, memory and equality, from what its runs report."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from tiermem.models.gpt import GPTConfig


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes per parameter that one phase of a step moves."""

    read: float
    written: float


def nominal_phases(precision: str, update: str, spilled: bool) -> dict[str, Phase]:
    """The table in train_step.py; in fp32 the parameter is its own master: 4, and 8 of moments."""
    parameter = 2 if precision == "bf16" else 4
    states = 10 if precision == "bf16" else 8
    if update == "backward":
        return {
            "forward": Phase(parameter, 0),
            "backward": Phase(parameter + states, parameter + states),
        }
    gradient = parameter if spilled else 0
    return {
        "forward": Phase(parameter + states + gradient, parameter + states),
        "backward": Phase(parameter, gradient),
    }


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of the drive: alone, and read and write at once."""

    read: float
    write: float
    duplex_read: float
    duplex_write: float
    direct: bool

    def seconds(self, read: float, written: float) -> float:
        """The least time for so many bytes: at once as long as both last, or one after the other."""
        together = min(read / self.duplex_read, written / self.duplex_write)
        rest_read = read - together * self.duplex_read
        rest_written = written - together * self.duplex_write
        overlapped = together + rest_read / self.read + rest_written / self.write
        return min(overlapped, read / self.read + written / self.write)


def best(one: Bandwidth, two: Bandwidth) -> Bandwidth:
    """The better of two measurements, for each way of use."""
    duplex = max((one, two), key=lambda b: b.duplex_read + b.duplex_write)
    return Bandwidth(
        read=max(one.read, two.read),
        write=max(one.write, two.write),
        duplex_read=duplex.duplex_read,
        duplex_write=duplex.duplex_write,
        direct=one.direct and two.direct,
    )


def medians(marks: list[dict[str, float]], steps: int) -> dict[str, float]:
    """Of each phase and of the whole step, over the last ``steps``."""
    timed = marks[-steps:]
    phases = {name: statistics.median(step[name] for step in timed) for name in timed[0]}
    return phases | {"step": statistics.median(sum(step.values()) for step in timed)}


def timing_fields(
    options: argparse.Namespace,
    model: GPTConfig,
    ours: dict[str, Any],
    compute_runs: list[dict[str, Any]],
    bandwidth: Bandwidth | None,
) -> dict[str, Any]:
    """Step times, bytes, floors and the efficiency."""
    begin, end = ours["begin"], ours["end"]
    per_step = options.steps * model.num_parameters
    read = (end["read_bytes"] - begin["read_bytes"]) / per_step
    written = (end["written_bytes"] - begin["written_bytes"]) / per_step
    times = medians(ours["marks"], options.steps)
    elapsed = end["time"] - begin["time"]
    fields: dict[str, Any] = {
        "step_s": times["step"],
        "step_mean_s": elapsed / options.steps,
        "forward_s": times["forward"],
        "backward_s": times["backward"],
        "optimizer_s": times["optimizer"],
        "stall_share": (end["stall_seconds"] - begin["stall_seconds"]) / elapsed,
        "tokens_per_s": options.batch_size * options.sequence_length / times["step"],
        "read_bytes_per_param": read,
        "written_bytes_per_param": written,
    }
    # The device's counters have everyone's bytes; the process's tell whether others were at it.
    for source, label in (("device", "block_device"), ("process", "process")):
        if not (begin[source] and end[source]):
            continue
        for index, (name, value) in enumerate((("read", read), ("written", written))):
            counted = (end[source][index] - begin[source][index]) / per_step
            fields[f"{label}_{name}_bytes_per_param"] = counted
            fields[f"{label}_{name}_agreement"] = value / counted if counted else None
    if not compute_runs:
        return fields
    measured = [medians(run["marks"], options.steps) for run in compute_runs]
    compute = {name: min(run[name] for run in measured) for name in measured[0]}
    fields["compute_only_s"] = compute["forward"] + compute["backward"]
    fields["compute_forward_s"] = compute["forward"]
    fields["compute_backward_s"] = compute["backward"]
    fields["compute_update_s"] = compute["optimizer"]
    return fields | floor_fields(options, model, fields, bandwidth)


def floor_fields(
    options: argparse.Namespace,
    model: GPTConfig,
    timing: dict[str, Any],
    bandwidth: Bandwidth | None,
) -> dict[str, Any]:
    """The floor of each phase, and of the step."""
    read, written = timing["read_bytes_per_param"], timing["written_bytes_per_param"]
    kept, spilled = (nominal_phases(options.precision, options.update, s) for s in (False, True))
    # Half a gradient more than without spilling means that gradients were spilled.
    gradients_spilled = written > sum(phase.written for phase in kept.values()) + 1
    phases = spilled if gradients_spilled else kept
    read_share = min(1.0, read / sum(phase.read for phase in phases.values()))
    written_share = min(1.0, written / sum(phase.written for phase in phases.values()))
    update_in = "forward" if options.update == "deferred" else "backward"
    floors, with_update, io_floor = {}, 0.0, 0.0
    for name, phase in phases.items():
        io = 0.0
        if bandwidth is not None:
            count = model.num_parameters
            io = bandwidth.seconds(
                phase.read * read_share * count, phase.written * written_share * count
            )
        compute = timing[f"compute_{name}_s"]
        update = timing["compute_update_s"] if name == update_in else 0.0
        floors[name] = {"compute_s": compute, "io_s": io, "floor_s": max(compute, io)}
        with_update += max(compute + update, io)
    if bandwidth is not None:
        io_floor = bandwidth.seconds(
            sum(phase.read for phase in phases.values()) * read_share * model.num_parameters,
            sum(phase.written for phase in phases.values()) * written_share * model.num_parameters,
        )
    floor = sum(phase["floor_s"] for phase in floors.values())
    return {
        "gradients_spilled": gradients_spilled,
        "io_floor_s": io_floor,
        "floor_by_phase": floors,
        "floor_s": floor,
        "efficiency": floor / timing["step_s"],
        "floor_with_update_s": with_update,
        "efficiency_with_update": with_update / timing["step_s"],
        "bandwidth": None if bandwidth is None else asdict(bandwidth),
    }


def memory_fields(
    ours: dict[str, Any], baseline: dict[str, Any], plain: dict[str, Any] | None
) -> dict[str, Any]:
    """The peak, and what of it no baseline, budget or activation explains."""
    same_source = ours["peak_memory_source"] == baseline["peak_memory_source"]
    activations = plain["activation_bytes"] if plain is not None else None
    budgets = ours["host_budget_bytes"] + ours["device_budget_bytes"]
    # What a budget allows but was never used is no excuse: count the peaks where they are lower.
    used = ours["host_peak_bytes"] + ours["device_peak_bytes"]
    fields = {key: ours[key] for key in ("peak_memory_bytes", "peak_memory_source", "vm_hwm_bytes")}
    fields |= {
        "torch_baseline_bytes": baseline["peak_memory_bytes"] if same_source else None,
        "torch_baseline_vm_hwm_bytes": baseline["vm_hwm_bytes"],
        "activation_bytes": activations,
        "host_budget_bytes": ours["host_budget_bytes"],
        "device_budget_bytes": ours["device_budget_bytes"],
        "host_peak_bytes": ours["host_peak_bytes"],
        "device_peak_bytes": ours["device_peak_bytes"],
        "state_bytes": ours["state_bytes"],
    }
    if same_source and activations is not None:
        unexplained = ours["peak_memory_bytes"] - baseline["peak_memory_bytes"] - activations
        fields["memory_over_bytes"] = unexplained - min(budgets, used)
    return fields


def equality_fields(
    options: argparse.Namespace,
    ours: dict[str, Any],
    resident: dict[str, Any] | None,
    plain: dict[str, Any] | None,
) -> dict[str, Any]:
    """Whether losses and final states have the bits of the runs in memory."""
    fields: dict[str, Any] = {"checked_steps": len(ours["losses"])}
    if resident is None or not options.check_steps:
        fields["losses_equal_in_memory"] = None
        fields["losses_equal_in_memory_why"] = (
            "not asked for" if not options.check_steps else "the resident run does not fit in memory"
        )
    else:
        fields["losses_equal_in_memory"] = ours["losses"] == resident["losses"]
        fields["states_equal_in_memory"] = ours["state_hash"] == resident["state_hash"]
        fields["state_hash"] = ours["state_hash"]
    theirs = plain["losses"] if plain is not None else None
    fields["losses_equal_plain_pytorch"] = None if theirs is None else ours["losses"] == theirs
    return fields
