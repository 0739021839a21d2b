"""`BatchSizes`: how the samples of one step are divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiermem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples of one step, of one rank's backward, and backwards of one step; None: to be derived.

    ``train = micro * accumulation * ranks``, as in DeepSpeed.
    """

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None

    def resolve(self, world_size: int) -> BatchSizes:
        """All three, for ``world_size`` ranks that have different samples.

        One that is missing is derived from the others. Of two or three that are missing,
        ``accumulation`` is 1 first, then ``micro``. Raises `ConfigError` if no whole number fits.
        """
        if world_size < 1:
            raise ConfigError(f"batch sizes are for at least 1 rank, not {world_size}")
        train, micro, accumulation = self.train, self.micro, self.accumulation
        if accumulation is None:
            accumulation = 1 if train is None or micro is None else train // (micro * world_size)
        if micro is None:
            micro = 1 if train is None else train // (max(accumulation, 1) * world_size)
        if train is None:
            train = micro * accumulation * world_size
        if train != micro * accumulation * world_size:
            raise ConfigError(self._mismatch(world_size, micro, accumulation))
        return BatchSizes(train, micro, accumulation)

    @property
    def by_key(self) -> Mapping[str, int | None]:
        """By DeepSpeed's names."""
        return {
            "train_batch_size": self.train,
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
        }

    def _mismatch(self, world_size: int, micro: int, accumulation: int) -> str:
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        stated = ", ".join(f"{key} {value or 'left out'}" for key, value in self.by_key.items())
        assert self.train is not None
        micro, accumulation = max(micro, 1), max(accumulation, 1)
        fixes = [f"train_batch_size {micro * accumulation * world_size}"]
        if self.train % (accumulation * world_size) == 0:
            fixes.append(f"train_micro_batch_size_per_gpu {self.train // (accumulation * world_size)}")
        if self.train % (micro * world_size) == 0:
            fixes.append(f"gradient_accumulation_steps {self.train // (micro * world_size)}")
        if self.train % (micro * accumulation) == 0:
            fixes.append(f"{self.train // (micro * accumulation)} ranks")
        return (
            f"batch sizes do not fit {ranks}: {stated}; train_batch_size must be "
            f"train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks. Any one of these "
            f"alone mends it: {'; '.join(fixes)}"
        )
