"""Whether a run has room, from its sizes alone: before a model is built, which takes its time too.

These are lower bounds: what they let pass may still be refused, exactly, once there is a model.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tiermem.cli.job import TrainJob
from tiermem.config import TierConfig
from tiermem.errors import BudgetError
from tiermem.io.files import free_bytes
from tiermem.memory.budget import available_host_memory, default_host_budget, local_rank_count
from tiermem.models.gpt import GPTConfig
from tiermem.store.rundir import check_paths, dead_bytes
from tiermem.types import format_bytes

SAVED_PER_BLOCK = 16
"""Elements that a block keeps for backward, in units of tokens times hidden size."""


def check_room(job: TrainJob, config: TierConfig, model: GPTConfig, num_ranks: int = 1) -> None:
    """Raises `BudgetError` with the figures if ``model`` cannot fit, `ConfigError` for paths that
    cannot be used."""
    narrow = config.compute_dtype == "bf16"
    parts = {"params": 2 if narrow else 4, "optimizer": 10 if narrow else 8}  # bytes per parameter
    on = {"device": 0, "host": 0, "nvme": 0}
    for name, nbytes in parts.items():
        shared = config.stage == 3 or (name == "optimizer" and config.stage > 0)
        on[getattr(config, name)] += nbytes * model.num_parameters // (num_ranks if shared else 1)
    on_cpu = _computes_on_cpu(config)
    _check_memory(model, on, on_cpu=on_cpu)
    budget = int(config.host_memory or default_host_budget())
    if config.uses_nvme:
        check_paths(config.paths)
        resident = budget if config.resident_memory is None else min(budget, config.resident_memory)
        _check_drives(model, config, max(0, on["nvme"] - resident))
    if on_cpu:
        _check_activations(job, config, model, min(budget, on["host"] + on["nvme"]) + on["device"])


def _computes_on_cpu(config: TierConfig) -> bool:
    if config.device != "auto":
        return config.device.startswith("cpu")
    return torch.accelerator.current_accelerator(check_available=True) is None


def _check_memory(model: GPTConfig, on: dict[str, int], *, on_cpu: bool) -> None:
    """Against what the machine has; the budgets are divided, exactly, when there is a model."""
    available = available_host_memory().available
    needed = (on["host"] + (on["device"] if on_cpu else 0)) * local_rank_count()
    if needed > available:
        raise BudgetError(
            f"{model.num_parameters:,} parameters need {format_bytes(needed)} of memory for what is "
            f"not on nvme; {format_bytes(available)} ({available} bytes) are available. Remedy: a "
            f"smaller --params, or --params-on nvme --optimizer-on nvme"
        )


def _check_drives(model: GPTConfig, config: TierConfig, nbytes: int) -> None:
    """``nbytes`` go to the paths by weight; paths on one filesystem share its space. Weights that the
    runtime will find by itself are not known yet: then all paths together have to take it."""
    weights = config.path_weights or (1.0,) * len(config.paths)
    needed: dict[int, int] = {}
    paths: dict[int, list[Path]] = {}
    for path, weight in zip(config.paths, weights, strict=True):
        device = os.stat(path).st_dev if config.path_weights else 0
        needed[device] = needed.get(device, 0) + int(nbytes * weight / sum(weights))
        paths.setdefault(device, []).append(path)
    for device, there in paths.items():
        apart = {os.stat(path).st_dev: path for path in there}
        free = sum(map(free_bytes, apart.values())) + sum(map(dead_bytes, there))
        if needed[device] > free:
            raise BudgetError(
                f"{model.num_parameters:,} parameters need {format_bytes(needed[device])} on "
                f"{', '.join(map(str, there))} beside what host memory keeps; {format_bytes(free)} "
                f"({free} bytes) are free there. Remedy: a smaller --params, or --path with more space"
            )


def _check_activations(job: TrainJob, config: TierConfig, model: GPTConfig, states: int) -> None:
    """What autograd keeps between forward and backward, beside ``states`` bytes in memory."""
    itemsize = 2 if config.compute_dtype == "bf16" else 4
    per_token = model.num_layers * SAVED_PER_BLOCK * model.hidden_size * itemsize
    per_token += model.vocab_size * (itemsize + 8)  # logits, then as fp32, then log-probabilities
    ranks = local_rank_count()
    needed = job.batch_size * job.sequence_length * per_token * ranks
    left = max(0, available_host_memory().available - states * ranks)
    if needed > left:
        raise BudgetError(
            f"a step of {job.batch_size} x {job.sequence_length} bytes keeps {format_bytes(needed)} of "
            f"activations; {format_bytes(left)} ({left} bytes) of memory are left beside the states. "
            f"Remedy: a smaller --batch-size, --sequence-length or --host-memory"
        )
