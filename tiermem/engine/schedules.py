"""Learning rate schedules under the names, parameters and numbers of DeepSpeed's.

[Note: iterations] DeepSpeed counts *iterations*: -1 when a schedule is made, and one more with each
``step()``, which follows the optimizer's. So the optimizer's first step has the rate of iteration -1,
which is where the schedule starts, and its second step that of iteration 0. torch's schedulers count
from 0 (``last_epoch``), one ahead.

Formulas are those of DeepSpeed's documentation ("Learning Rate Schedulers") and of its source,
``deepspeed/runtime/lr_schedules.py`` of 0.19.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tiermem.engine.schedule_options import (
    PerGroup,
    Warmup,
    check_positive,
    check_total,
    check_warmup,
    per_group,
    warmed,
)
from tiermem.errors import ConfigError, StateError

logger = logging.getLogger(__name__)

_CYCLED_BETA2 = 0.99
"""What `OneCycle` sets the second beta to while it cycles the first; DeepSpeed's value."""


class IterationSchedule(LRScheduler):
    """A scheduler that counts iterations; see [Note: iterations]. Tensor learning rates work."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        if last_batch_iteration < -1:
            raise ConfigError(
                f"last_batch_iteration is {last_batch_iteration}; it must be at least -1, which starts "
                f"the schedule"
            )
        if last_batch_iteration >= 0:  # torch wants to know where the schedule had started
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """The iteration whose rates are set now."""
        return self.last_epoch - 1

    def step(self, epoch: int | None = None) -> None:
        """Goes on to the next iteration, or to the iteration ``epoch``."""
        if epoch is not None:
            self.last_epoch = epoch
        super().step()
        self._set_momentum()

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is; plain numbers. What it is comes from its constructor."""
        return {
            "last_batch_iteration": self.last_batch_iteration,
            "base_lrs": [float(lr) for lr in self.base_lrs],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state of this class, or one of DeepSpeed's (``last_batch_iteration`` alone), and sets
        the optimizer's rates to those of that iteration. Raises `StateError`."""
        if "last_batch_iteration" not in state_dict:
            raise StateError(
                f"the state of a {type(self).__name__} has 'last_batch_iteration'; this one has "
                f"only {sorted(state_dict)}"
            )
        saved = state_dict.get("base_lrs", self.base_lrs)
        if len(saved) != len(self.optimizer.param_groups):
            raise StateError(
                f"the loaded schedule has rates of {len(saved)} parameter groups, the optimizer has "
                f"{len(self.optimizer.param_groups)}"
            )
        self.base_lrs = list(saved)
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._set_momentum()

    def _set_momentum(self) -> None:
        """Sets what a schedule changes beside rates."""


class WarmupLR(IterationSchedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` over ``warmup_num_steps`` iterations, then constant.

    The share of the way at iteration i is ``log(i + 1) / log(warmup_num_steps)`` for ``warmup_type``
    ``"log"`` and ``i / warmup_num_steps`` for ``"linear"``. Without ``warmup_max_lr`` it is the
    optimizer's rate. ``warmup_num_steps`` below 2 counts as 2. Raises `ConfigError`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Warmup = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lrs = per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self._max_lrs: list[float] | None = None
        if warmup_max_lr is not None:
            self._max_lrs = per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self._num_steps = check_warmup(warmup_num_steps, warmup_type)
        self._type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Any]:
        iteration = self.last_batch_iteration
        if iteration < 0:
            return list(self._min_lrs)
        # Like DeepSpeed's, all groups warm up to the first one's rate if none is given.
        highs = self._max_lrs or [float(self.base_lrs[0])] * len(self._min_lrs)
        share = self._share(iteration)
        return [low + (high - low) * share for low, high in zip(self._min_lrs, highs, strict=True)]

    def _share(self, iteration: int) -> float:
        if iteration < self._num_steps:
            return warmed(iteration, self._num_steps, self._type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linearly down to 0 at iteration ``total_num_steps``, where it stays."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Warmup = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = check_total(total_num_steps, warmup_num_steps)
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _share(self, iteration: int) -> float:
        if iteration < self._num_steps:
            return super()._share(iteration)
        return max(0.0, (self._total - iteration) / max(1.0, self._total - self._num_steps))


class WarmupCosineLR(IterationSchedule):
    """Multiplies each group's own rate by a ratio: from ``warmup_min_ratio`` to 1 over
    ``warmup_num_steps`` iterations as in `WarmupLR`, then along half a cosine down to ``cos_min_ratio``
    at iteration ``total_num_steps - 1``, where it stays. At iteration -1 the rate is 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Warmup = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._num_steps = check_warmup(warmup_num_steps, warmup_type)
        self._total = check_total(total_num_steps, warmup_num_steps)
        self._min_ratio = warmup_min_ratio
        self._type = warmup_type
        self._last_ratio = cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [float(lr) * ratio for lr in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """What the rates are multiplied by now."""
        iteration = self.last_batch_iteration
        if iteration < 0:
            return 0.0
        if iteration < self._num_steps:
            share = warmed(iteration, self._num_steps, self._type)
            return self._min_ratio + (1.0 - self._min_ratio) * share
        done = (iteration - self._num_steps + 1) / max(1, self._total - self._num_steps)
        height = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self._last_ratio + (1.0 - self._last_ratio) * height)


class LRRangeTest(IterationSchedule):
    """Grows the rate without end, to find the largest one that works (Smith, "A disciplined approach
    to neural network hyper-parameters: Part 1", 2018): at iteration i it is ``min_lr * (1 + step_rate *
    (i + 1) / step_size)``, and with ``staircase`` the quotient is rounded down."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lrs = per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self._step_size = check_positive("lr_range_test_step_size", lr_range_test_step_size)
        self._step_rate = lr_range_test_step_rate
        self._staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Any]:
        interval = (self.last_batch_iteration + 1) / self._step_size
        if self._staircase:
            interval = math.floor(interval)
        return [low * (1 + self._step_rate * interval) for low in self._min_lrs]


class OneCycle(IterationSchedule):
    """The rate from ``cycle_min_lr`` up to ``cycle_max_lr`` over ``cycle_first_step_size`` iterations
    and down again over ``cycle_second_step_size`` (default: as many); then, n iterations after the
    cycle, ``cycle_min_lr / (1 + decay_lr_rate * n / decay_step_size)``; ``decay_step_size`` 0: none.

    A stair count above 0 makes that half of the cycle climb in so many stairs (the second half's
    default is the first's). With ``cycle_momentum`` the first of each group's ``betas`` goes the other
    way, from ``cycle_max_mom`` to ``cycle_min_mom`` and back, and is multiplied by ``1 + decay_mom_rate
    * n / decay_step_size`` after the cycle; the second is 0.99, as in DeepSpeed. Optimizers without
    ``betas`` keep their momentum; a warning in the log says so. Before the first ``step()`` it is
    ``cycle_min_mom``. (Smith 2018, as for `LRRangeTest`.)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._min_lrs = per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self._max_lrs = per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self._min_moms = per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self._max_moms = per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self._up = check_positive("cycle_first_step_size", cycle_first_step_size)
        second = self._up if cycle_second_step_size is None else cycle_second_step_size
        self._down = check_positive("cycle_second_step_size", second)
        self._stairs_up = cycle_first_stair_count
        self._stairs_down = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self._decay_step_size = decay_step_size
        self._decay_lr_rate = decay_lr_rate
        self._decay_mom_rate = decay_mom_rate
        self._cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self._cycles_momentum:
            logger.warning(
                "OneCycle: %s has no betas, so its momentum is not cycled", type(optimizer).__name__
            )
        super().__init__(optimizer, last_batch_iteration)

    def _set_momentum(self) -> None:
        if self._cycles_momentum:
            for group, momentum in zip(self.optimizer.param_groups, self.get_mom(), strict=True):
                group["betas"] = (momentum, _CYCLED_BETA2)

    def get_lr(self) -> list[Any]:
        after = self._iterations_after
        if after:
            fall = 1 + self._decay_lr_rate * self._decay_intervals(after)
            return [low / fall for low in self._min_lrs]
        height = self._height()
        return [
            low + (high - low) * height for low, high in zip(self._min_lrs, self._max_lrs, strict=True)
        ]

    def get_mom(self) -> list[float]:
        """The first beta of each group now."""
        if self.last_batch_iteration < 0:
            return list(self._min_moms)
        after = self._iterations_after
        if after:
            growth = 1 + self._decay_mom_rate * self._decay_intervals(after)
            return [high * growth for high in self._max_moms]
        height = self._height()
        return [
            high - (high - low) * height
            for low, high in zip(self._min_moms, self._max_moms, strict=True)
        ]

    @property
    def _iterations_after(self) -> int:
        """How many iterations of the decay are over; 0 within the cycle."""
        return max(0, self.last_batch_iteration + 1 - self._up - self._down)

    def _decay_intervals(self, iterations: int) -> float:
        return iterations / self._decay_step_size if self._decay_step_size else 0.0

    def _height(self) -> float:
        """Where in the cycle it is: 0 at its ends, 1 at its peak."""
        done = self.last_batch_iteration + 1
        rising = done <= self._up
        left, size = (done, self._up) if rising else (self._up + self._down - done, self._down)
        stairs = self._stairs_up if rising else self._stairs_down
        return math.floor(left * stairs / size) / stairs if stairs > 0 else left / size


_SCHEDULES: dict[str, type[LRScheduler]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def make_schedule(
    type_name: str, params: Mapping[str, Any] | None, optimizer: Optimizer
) -> LRScheduler:
    """The schedule that a configuration's ``scheduler`` block names by its ``type`` and ``params``: one
    of this module, or a scheduler of ``torch.optim.lr_scheduler``.

    Raises `ConfigError` with the nearest name for an unknown one, and for parameters that the schedule
    does not take, lacks, or refuses.
    """
    cls = _find_class(type_name)
    given = dict(params or {})
    accepted = dict(list(inspect.signature(cls).parameters.items())[1:])  # the first is the optimizer
    problems = [
        f"{name!r} is not one of its parameters; {_nearest(name, accepted)}"
        for name in given
        if name not in accepted
    ]
    problems += [
        f"{name!r} is missing"
        for name, parameter in accepted.items()
        if parameter.default is inspect.Parameter.empty and name not in given
    ]
    if problems:
        raise ConfigError(f"scheduler {type_name}: " + "; ".join(problems))
    try:
        return cls(optimizer, **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler {type_name} with {given}: {error}") from error


def _find_class(type_name: str) -> type[LRScheduler]:
    found = _SCHEDULES.get(type_name) or getattr(lr_scheduler, type_name, None)
    if isinstance(found, type) and issubclass(found, LRScheduler) and found is not LRScheduler:
        return found
    raise ConfigError(
        f"scheduler type {type_name!r} is unknown; {_nearest(type_name, _SCHEDULES)}, and the "
        f"schedulers of torch.optim.lr_scheduler"
    )


def _nearest(name: str, valid: Mapping[str, object]) -> str:
    near = {known.lower(): known for known in valid}
    match = difflib.get_close_matches(name.lower(), near, n=1, cutoff=0.5)
    return f"did you mean {near[match[0]]!r}?" if match else f"valid: {', '.join(valid)}"
