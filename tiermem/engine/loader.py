"""The data loader that `tiermem.initialize` makes of ``training_data``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class EpochLoader:
    """A `torch.utils.data.DataLoader` whose every pass shuffles anew, each rank seeing its own share.

    ``batch_size`` is that of a micro-step. An iterable dataset shares itself out and is not shuffled.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            self._sampler = DistributedSampler(dataset, world_size, rank)
        self._epoch = 0
        self._pass: Iterator[Any] | None = None
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size, sampler=self._sampler, collate_fn=collate_fn, drop_last=drop_last
        )

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is not None:
            self._sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self.loader)

    def __next__(self) -> Any:
        """The next batch of a pass that goes on from call to call, for loops without ``for``."""
        if self._pass is None:
            self._pass = iter(self)
        try:
            return next(self._pass)
        except StopIteration:
            self._pass = None
            raise

    def __len__(self) -> int:
        return len(self.loader)
