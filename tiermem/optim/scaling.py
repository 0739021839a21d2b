"""Loss scaling: keeps small gradients above what fp16 can hold, and skips steps that overflowed.

[Note: loss scale] The loss is multiplied by the scale before backward and the gradients divided by it
inside the update (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2). A gradient
that is not finite, on any rank, skips the step on all: nothing is updated, no step is counted. The
dynamic scale follows DeepSpeed's rules: the ``hysteresis``-th overflow halves it, and so does each one
after it, until ``loss_scale_window`` steps in a row had none; then it doubles, and as many overflows as
before are forgiven.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tiermem.config import LossScaleConfig
from tiermem.errors import StateError

_LARGEST = 2.0**64
"""Beyond it a scale does not help fp16 any more, and fp32 losses come near their own limit."""


class LossScaler:
    """The scale of one optimizer's losses, and what has become of it. See [Note: loss scale]."""

    def __init__(self, options: LossScaleConfig) -> None:
        self._options = options
        self.dynamic = options.loss_scale == 0
        self.scale = float(2**options.initial_scale_power) if self.dynamic else options.loss_scale
        self.skipped_steps = 0
        self.overflow = False  # in the last step
        self._used = False  # since the last step
        self._good_steps = 0  # in a row
        self._forgiven = options.hysteresis - 1  # overflows until the scale is halved
        self.stuck_steps = 0  # overflows in a row at a scale that cannot be lowered

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the scale, in fp32 (fp64 stays fp64)."""
        self._used = True
        return (loss if loss.dtype == torch.float64 else loss.float()) * self.scale

    def note_used(self) -> None:
        """Gradients come that have the scale."""
        self._used = True

    def check_used(self) -> None:
        """Before gradients are used. Raises `StateError` if they cannot be those of a scaled loss."""
        if self.dynamic and not self._used:
            raise StateError(
                f"step() divides gradients by the loss scale ({self.scale:g}), but no loss was scaled "
                f"since the last step. Remedy: optimizer.scale(loss).backward(); with two optimizers "
                f"over one loss, a fixed scale: fp16: {{'loss_scale': {self.scale:g}}}"
            )

    def stepped(self, *, overflow: bool) -> bool:
        """Takes note of a step and sets the scale for the next; True if there is no hope left."""
        self._used = False
        self.overflow = overflow
        if not overflow:
            self._good_steps += 1
            self.stuck_steps = 0
            if self.dynamic and self._good_steps % self._options.loss_scale_window == 0:
                self.scale = min(self.scale * 2, max(_LARGEST, self.scale))
                self._forgiven = self._options.hysteresis - 1
            return False
        self.skipped_steps += 1
        self._good_steps = 0
        if self.dynamic and self._forgiven > 0:
            self._forgiven -= 1
        elif self.dynamic and self.scale > self._options.min_loss_scale:
            self.scale = max(self.scale / 2, self._options.min_loss_scale)
        else:
            self.stuck_steps += 1
        return self.stuck_steps >= self._options.max_skipped_steps

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on has to know; plain numbers."""
        return {
            "scale": self.scale,
            "skipped_steps": self.skipped_steps,
            "good_steps": self._good_steps,
            "forgiven": self._forgiven,
            "stuck_steps": self.stuck_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state of another scaler; a fixed scale stays what the configuration says."""
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise StateError(f"the loaded state of the loss scale lacks {', '.join(missing)}")
        if self.dynamic:
            self.scale = max(float(state["scale"]), self._options.min_loss_scale)
        self.skipped_steps = int(state["skipped_steps"])
        self._good_steps = int(state["good_steps"])
        self._forgiven = min(int(state["forgiven"]), self._options.hysteresis - 1)
        self.stuck_steps = int(state["stuck_steps"])
