"""What decides about a whole step: the norm of all gradients, clipping, and the loss scale."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from tiermem.config import LossScaleConfig
from tiermem.errors import ConfigError, StateError
from tiermem.optim.norms import not_finite, sum_of_squares
from tiermem.optim.scaling import LossScaler

if TYPE_CHECKING:
    from tiermem.optim.base import TieredOptimizer

logger = logging.getLogger(__name__)


class StepControl:
    """One optimizer's. Over several ranks all of them call it alike, and come to the same numbers."""

    def __init__(self, optimizer: TieredOptimizer) -> None:
        self._optimizer = optimizer
        self.scaler: LossScaler | None = None
        self.unscale = 1.0  # of the step that is being taken
        self.norm: float | None = None  # the last, before clipping and without the loss scale
        self.clipped_norm: float | None = None
        self._squares = (-1, 0.0)  # of which gradients (`GradientStore.changes`), and their sum

    @property
    def loss_scale(self) -> float:
        """The scale of the losses whose gradients are there; 1 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def scale_losses(self) -> None:
        """Losses are scaled from here on. Raises `ConfigError` if updates cannot be skipped."""
        runtime = self._optimizer.runtime
        if runtime.updates.in_backward:
            raise ConfigError(
                "fp16 parameters need loss scaling, where an overflow anywhere skips the whole step, "
                "but update: 'backward' updates during backward. Remedy: update: 'deferred'"
            )
        if self.scaler is None:
            self.scaler = LossScaler(runtime.config.fp16 or LossScaleConfig())
            runtime.updates.figures.loss_scale = self.scaler.scale

    def gradients_come(self) -> None:
        """They are those of scaled losses, though no loss was scaled here."""
        if self.scaler is not None:
            self.scaler.note_used()

    def grad_norm(self) -> float:
        """See `TieredOptimizer.grad_norm`."""
        runtime = self._optimizer.runtime
        runtime.reducer.flush()
        squares = sum_of_squares(self._optimizer.groups(), self._optimizer.counts)
        self._squares = (runtime.gradients.changes, squares)
        self.norm = math.sqrt(squares) / self.loss_scale if math.isfinite(squares) else squares
        self.clipped_norm = self.norm
        runtime.updates.figures.grad_norm = runtime.updates.figures.clipped_norm = self.norm
        return self.norm

    def clip(self, max_norm: float, *, error_if_nonfinite: bool) -> float:
        """See `TieredOptimizer.clip_grad_norm_`; the norm before."""
        runtime = self._optimizer.runtime
        if runtime.updates.in_backward:
            raise StateError(
                "clip_grad_norm_ needs all gradients before any update, but update: 'backward' updates "
                "during backward. Remedy: update: 'deferred'"
            )
        if not max_norm >= 0:
            raise ConfigError(f"max_norm is {max_norm}; it must be at least 0")
        norm = self.grad_norm()
        if error_if_nonfinite and not math.isfinite(norm):
            raise StateError(f"the gradient norm is {norm}; pass error_if_nonfinite=False to go on")
        factor = min(1.0, max_norm / (norm + 1e-6)) if not math.isnan(norm) else math.nan
        for group in self._optimizer.groups():
            if group.gradient is not None:
                group.gradient.scale *= factor
        self.clipped_norm = norm * factor if math.isfinite(norm) else norm
        runtime.updates.figures.clipped_norm = self.clipped_norm
        return norm

    def skips(self) -> bool:
        """Whether the step that is about to use the gradients is skipped for an overflow, and they
        are forgotten; see [Note: loss scale]. Sets ``unscale`` for it."""
        scaler, runtime = self.scaler, self._optimizer.runtime
        if scaler is None:
            return False
        scaler.check_used()
        if self._squares[0] != runtime.gradients.changes:  # else clipping has just looked
            self.grad_norm()
        overflow = not math.isfinite(self._squares[1])
        scale, self.unscale = scaler.scale, 1 / scaler.scale
        hopeless = scaler.stepped(overflow=overflow)
        runtime.updates.figures.loss_scale = scaler.scale
        runtime.updates.figures.skipped_steps = scaler.skipped_steps
        if not overflow:
            return False
        groups = self._optimizer.groups()
        names = not_finite(groups, self._optimizer.counts) if hopeless else []
        for group in groups:
            runtime.gradients.discard(group)
        if hopeless:
            raise StateError(_hopeless(scale, scaler, names))
        logger.info("gradients overflowed: step skipped, loss scale %g -> %g", scale, scaler.scale)
        return True


def _hopeless(scale: float, scaler: LossScaler, names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    lower = "lower fp16's min_loss_scale" if scaler.dynamic else "lower fp16's loss_scale"
    return (
        f"gradients are not finite at the loss scale {scale:g}, which may not be lowered, for "
        f"{scaler.stuck_steps} steps in a row; this time those of {', '.join(names[:8])}{more}. "
        f"Remedy: find out why (learning rate, data, initialisation), {lower}, or compute in bf16. "
        f"Parameters and states are those of the last good step"
    )
