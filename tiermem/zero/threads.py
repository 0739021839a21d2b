"""How many threads one rank computes with: the cores of its machine, divided by the ranks there.

torchrun sets ``OMP_NUM_THREADS`` to 1 if it starts several processes and nobody has set it. That is no
wish of the user's, and is told apart from one by the environment that torchrun itself was started with,
which Linux shows as it was then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from tiermem.memory.budget import local_rank_count

_VARIABLE = "OMP_NUM_THREADS"


def use_threads(configured: int | None) -> int:
    """The threads of this process, which torch's operations use from now on too: those ``configured``,
    or `num_compute_threads`. What the program has set itself by ``torch.set_num_threads``, and what the
    user set as ``OMP_NUM_THREADS``, stays."""
    if configured is not None:
        torch.set_num_threads(configured)
        return configured
    number, present = num_compute_threads(), torch.get_num_threads()
    if local_rank_count() > 1:
        of_torchrun = present == 1 and _set_by_torchrun(os.environ, Path("/proc"))
        of_nobody = present > number and _VARIABLE not in os.environ
        if of_torchrun or of_nobody:
            torch.set_num_threads(number)
    return number


def num_compute_threads(
    environment: Mapping[str, str] = os.environ, *, proc: Path = Path("/proc")
) -> int:
    """Threads for torch's operations and for the update kernels of this process: what the user set as
    ``OMP_NUM_THREADS``, or else its part of the cores."""
    text = environment.get(_VARIABLE, "").split(",")[0].strip()
    if text.isdigit() and int(text) and not _set_by_torchrun(environment, proc):
        return int(text)
    cores = os.sched_getaffinity(0)
    ranks = local_rank_count(environment)
    try:
        bound = cores < os.sched_getaffinity(os.getppid())  # each rank has cores of its own
    except OSError:
        bound = False
    return len(cores) if bound else max(1, len(cores) // ranks)


def _set_by_torchrun(environment: Mapping[str, str], proc: Path) -> bool:
    if "TORCHELASTIC_RUN_ID" not in environment or local_rank_count(environment) == 1:
        return False
    try:
        first = (proc / str(os.getppid()) / "environ").read_bytes()
    except OSError:
        return environment.get(_VARIABLE) == "1"  # what it sets
    return not any(entry.startswith(_VARIABLE.encode() + b"=") for entry in first.split(b"\0"))
