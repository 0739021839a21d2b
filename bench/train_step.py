"""How close a training step comes to what the machine allows, and that its bits are right.

    python bench/train_step.py --params 350M --placement nvme --host-memory 256MiB --update backward

Every figure comes from one run of this script, each in a process of its own: plain PyTorch in memory
(what a step computes), the training that is measured, the same with all states resident (the bits),
and the drive's bandwidth by bench/io.py before and after.

The floor of a step is the sum over its phases of max(compute, I/O). What each phase moves over NVMe,
in bytes per parameter, with bf16 parameters, split masters and everything non-resident:

    update     gradients   forward             backward
    backward   in memory   read 2              read 2 + 10, write 2 + 10
    deferred   in memory   read 2 + 10,        read 2
                           write 2 + 10
    deferred   spilled     read 2 + 10 + 2,    read 2, write 2
                           write 2 + 10

(2: the parameter or its gradient; 10: remainder of the master 2, moments 4 and 4.) A deferred update
runs under the next forward. Where less was moved than that, since some of it stayed in memory, the
floor counts what was moved. Compute is forward and backward of plain PyTorch; the optimizer's own
arithmetic is not in the floor (``floor_with_update_s`` adds it, as torch's fused AdamW takes it).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import arguments as argument
from machine import facts
from train_step_figures import (
    Bandwidth,
    best,
    equality_fields,
    memory_fields,
    timing_fields,
)

from tiermem.models.gpt import GPTConfig
from tiermem.store.mounts import find_mount
from tiermem.types import format_bytes

HERE = Path(__file__).resolve().parent
EXIT_BUFFERED = 3
PLAIN_BYTES_PER_PARAMETER = {"bf16": 20, "fp32": 16}
FORWARD_BACKWARD_BYTES_PER_PARAMETER = {"bf16": 4, "fp32": 8}
STATE_BYTES_PER_PARAMETER = 12


def load_io_bench() -> ModuleType:
    """bench/io.py, under a name that does not hide the standard library's."""
    spec = importlib.util.spec_from_file_location("bench_io", HERE / "io.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_io"] = module
    spec.loader.exec_module(module)
    return module


def measure_bandwidth(directory: str, seconds: float) -> Bandwidth:
    """Through the same engine with its defaults."""
    bench_io = load_io_bench()
    import tiermem.io as tio

    work = bench_io.Work(file_bytes=2 << 30, request_bytes=32 << 20)
    with bench_io.Bench(directory, work, "auto", tio.QueueOptions()) as bench:
        bench.run("duplex", seconds / 4)
        runs = {mode: bench.run(mode, seconds) for mode in ("read", "write", "duplex")}
    return Bandwidth(
        read=runs["read"].read_gb_per_s * 1e9,
        write=runs["write"].write_gb_per_s * 1e9,
        duplex_read=runs["duplex"].read_gb_per_s * 1e9,
        duplex_write=runs["duplex"].write_gb_per_s * 1e9,
        direct=all(run.direct for run in runs.values()),
    )


# ---- processes -------------------------------------------------------------------------------


@contextlib.contextmanager
def fresh_cgroup(name: str) -> Iterator[str | None]:
    """A memory cgroup below this process's own, gone afterwards; None where not permitted."""
    directory = _cgroup_parent()
    if directory is not None:
        directory = directory / f"tiermem-bench-{os.getpid()}-{name}"
        try:
            directory.mkdir()
        except OSError:
            directory = None
    try:
        yield None if directory is None else str(directory)
    finally:
        if directory is not None:
            with contextlib.suppress(OSError):
                directory.rmdir()


def _cgroup_parent() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path)
    with contextlib.suppress(OSError):
        if "memory" in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split():
            return Path("/sys/fs/cgroup")
    return None


def run_worker(role: str, spec: dict[str, Any]) -> dict[str, Any]:
    """One role in a fresh process and cgroup; what it reports."""
    print(f"running: {role}", file=sys.stderr, flush=True)
    with fresh_cgroup(role) as cgroup, tempfile.TemporaryDirectory(prefix="tiermem-bench-") as folder:
        result = Path(folder) / "result.json"
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(spec | {"role": role, "cgroup": cgroup, "result": str(result)}))
        done = subprocess.run(
            [sys.executable, str(HERE / "train_step_worker.py"), str(file)], check=False
        )
        if done.returncode or not result.exists():
            raise SystemExit(f"the {role} run failed with exit code {done.returncode}")
        loaded: dict[str, Any] = json.loads(result.read_text())
        return loaded


# ---- the run ---------------------------------------------------------------------------------


def runtime_config(options: argparse.Namespace, placement: str, directory: str) -> dict[str, Any]:
    """The configuration of one run, without what is not set."""
    config: dict[str, Any] = {
        "params": placement,
        "optimizer": placement,
        "compute_dtype": options.precision,
        "update": options.update,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "malloc_mmap_threshold": options.malloc_mmap_threshold or None,
    }
    if placement == "nvme":
        config["paths"] = [directory]
    if placement != "device":
        config["host_memory"] = options.host_memory
        config["device_memory"] = options.device_memory
        config["resident_memory"] = options.resident_memory
    return {key: value for key, value in config.items() if value is not None}


def measure(options: argparse.Namespace, model: GPTConfig) -> tuple[dict[str, Any], int]:
    """All runs and their figures; the exit code."""
    total_steps = max(options.warmup + options.steps, options.check_steps)
    nvme = options.placement == "nvme"
    spec: dict[str, Any] = {
        "model": asdict(model),
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "seed": options.seed,
        "precision": options.precision,
        "steps": options.steps,
        "total_steps": total_steps,
        "hash": options.check_steps > 0,
        "directory": options.directory if nvme else None,
    }
    bandwidth = measure_bandwidth(options.directory, options.io_seconds) if nvme else None
    if bandwidth is not None and not bandwidth.direct:
        return _buffered(options)
    baseline = run_worker("baseline", spec)
    plain = _run_plain(options, model, spec)
    spec["config"] = runtime_config(options, options.placement, options.directory)
    ours = run_worker("tiermem", spec)
    if nvme and not ours["direct"]:
        return _buffered(options)
    resident = _run_resident(options, model, spec, plain is None)
    if bandwidth is not None:
        bandwidth = best(bandwidth, measure_bandwidth(options.directory, options.io_seconds))
    compute_runs = [run for run in (plain or resident,) if run is not None]
    if plain is not None:  # before and after, like the drive: the faster one is the floor
        short = {"update": plain["losses"] is not None, "total_steps": options.warmup + options.steps}
        compute_runs.append(run_worker("plain", spec | short))
    fields = timing_fields(options, model, ours, compute_runs, bandwidth)
    fields["compute_only_by"] = _compute_source(plain, resident)
    fields |= memory_fields(ours, baseline, plain)
    fields |= equality_fields(options, ours, resident, plain)
    return fields, 0


def _buffered(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    print(
        f"{options.directory} serves no O_DIRECT: I/O fell back to buffered, no figures",
        file=sys.stderr,
    )
    return {"buffered": True}, EXIT_BUFFERED


def _run_plain(
    options: argparse.Namespace, model: GPTConfig, spec: dict[str, Any]
) -> dict[str, Any] | None:
    """Plain PyTorch: whole steps if they fit in memory, else forward and backward, else nothing."""
    available = psutil.virtual_memory().available * 0.85
    if model.num_parameters * PLAIN_BYTES_PER_PARAMETER[options.precision] < available:
        return run_worker("plain", spec | {"update": True})
    if model.num_parameters * FORWARD_BACKWARD_BYTES_PER_PARAMETER[options.precision] < available:
        few = options.warmup + options.steps
        return run_worker("plain", spec | {"update": False, "total_steps": few})
    return None


def _run_resident(
    options: argparse.Namespace, model: GPTConfig, spec: dict[str, Any], needed: bool
) -> dict[str, Any] | None:
    if not options.check_steps and not needed:
        return None
    if model.num_parameters * STATE_BYTES_PER_PARAMETER * 1.2 > psutil.virtual_memory().available:
        return None
    config = runtime_config(options, "device", options.directory)
    return run_worker("resident", spec | {"config": config})


def _compute_source(plain: dict[str, Any] | None, resident: dict[str, Any] | None) -> str | None:
    if plain is not None:
        return "plain PyTorch in memory"
    return "tiermem with all states resident" if resident is not None else None


def machine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Hardware, kernel, filesystem and versions."""
    import torch

    return {
        **facts(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "filesystem": find_mount(Path(options.directory)).filesystem,
        "num_threads": torch.get_num_threads(),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=argument.count, default=350_000_000, help="e.g. 350M")
    parser.add_argument("--placement", choices=("nvme", "host", "device"), default="nvme")
    parser.add_argument("--host-memory", default=None, help="budget, e.g. 256MiB")
    parser.add_argument("--device-memory", default=None, help="budget for gathered parameters")
    parser.add_argument("--resident-memory", default=None, help="host memory that keeps NVMe records")
    parser.add_argument(
        "--malloc-mmap-threshold", default="4MiB", help="of the run that is measured; '' leaves glibc's"
    )
    parser.add_argument("--update", choices=("backward", "deferred"), default="backward")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those")
    parser.add_argument(
        "--check-steps", type=int, default=20, help="compare at least so many; 0 is off"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--io-seconds", type=float, default=2.0, help="per measurement of the drive")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the drive to measure")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line on stdout")
    return parser.parse_args()


def print_report(result: dict[str, Any]) -> None:
    """The figures for people."""
    for name in ("step_s", "compute_only_s", "io_floor_s", "floor_s", "efficiency"):
        if name in result:
            print(f"{name:24} {result[name]:.3f}")
    for name in ("read_bytes_per_param", "written_bytes_per_param"):
        print(f"{name:24} {result[name]:.2f}")
    print(
        f"{'peak_memory':24} {format_bytes(result['peak_memory_bytes'])} "
        f"({result['peak_memory_source']})"
    )
    print(f"{'losses_equal_in_memory':24} {result['losses_equal_in_memory']}")


def main() -> int:
    options = parse_options()
    context = max(1024, options.sequence_length)
    model = GPTConfig.for_parameters(options.params, context=context)
    figures, code = measure(options, model)
    result = {
        "benchmark": "train_step",
        "params": model.num_parameters,
        **{
            name: getattr(options, name)
            for name in (
                "placement",
                "update",
                "precision",
                "host_memory",
                "batch_size",
                "sequence_length",
                "steps",
            )
        },
        **figures,
        **machine_fields(options),
    }
    if not options.json and code == 0:
        print_report(result)
    print(json.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(main())
