"""The ranks of a command that torchrun, or Slurm, has started several times."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiermem.errors import ConfigError

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place: ``rank`` of ``size``, ``local_rank`` on its machine."""

    rank: int
    size: int
    local_rank: int

    @property
    def first(self) -> bool:
        """Whether it is this rank that shows things."""
        return self.rank == 0


def find_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """From torchrun's variables; alone without them. Raises `ConfigError` for those that cannot be."""
    if environment.get("WORLD_SIZE", "1") == "1":
        return Ranks(0, 1, 0)
    missing = [name for name in _REQUIRED if name not in environment]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {', '.join(missing)} are not set. Remedy: "
            f"start with torchrun, or unset WORLD_SIZE"
        )
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return Ranks(rank, size, int(environment.get("LOCAL_RANK", rank)))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {error}") from error


def path_of_rank(path: str | Path, ranks: Ranks) -> str:
    """``path`` with ``{rank}`` and ``{local_rank}`` filled in."""
    text = str(path).replace("{rank}", str(ranks.rank))
    return text.replace("{local_rank}", str(ranks.local_rank))


@contextlib.contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    """The default group of torch.distributed, where there are several ranks."""
    if ranks.size == 1:
        yield
        return
    from torch import distributed as dist

    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the {ranks.size} ranks did not find each other: {error}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()
