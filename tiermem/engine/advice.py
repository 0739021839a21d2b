"""Notices that a training waits more than it computes, and says what helps.

Stage 3 moves 3 bytes for each byte of parameters and micro-step (Rajbhandari et al., "ZeRO", SC '20,
section 7), in the middle of forward and backward; only computing hides it, and how much there is to
compute for each parameter goes with the samples of a micro-step.
"""

from __future__ import annotations

import logging
import time

from tiermem.engine.settings import Settings
from tiermem.zero.runtime import Runtime

logger = logging.getLogger(__name__)

FIRST_STEP = 2  # those before record the use trace and fill caches
NUM_STEPS = 5
SHARE = 0.5


class WaitWatch:
    """Measures `NUM_STEPS` steps of a stage-3 training, once, and warns if the training thread waited
    for more than `SHARE` of their time."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._started_s = 0.0
        self._waited_s = 0.0
        moves = settings.world_size > 1 or runtime.config.params != "device"
        self._over = runtime.config.stage < 3 or not moves

    def stepped(self, steps: int) -> None:
        """After step number ``steps``."""
        if self._over:
            return
        if steps == FIRST_STEP:
            self._started_s = time.perf_counter()
            self._waited_s = self._seconds_waited()
        elif steps == FIRST_STEP + NUM_STEPS:
            self._over = True
            seconds = time.perf_counter() - self._started_s
            share = (self._seconds_waited() - self._waited_s) / max(seconds, 1e-9)
            if share > SHARE:
                logger.warning("%s", self._advice(share))

    def _seconds_waited(self) -> float:
        """By the training thread so far, for memory tiers or for other ranks (some for both)."""
        stats = self._runtime.stats()
        return max(stats.stall_seconds, stats.exchange_wait_seconds)

    def _advice(self, share: float) -> str:
        micro = self._settings.micro_batch_size
        others = self._settings.world_size > 1
        what = "other ranks" if others else f"{self._runtime.config.params!r}"
        return (
            f"stage 3 waited {share:.0%} of the last {NUM_STEPS} steps for parameters and gradients "
            f"from {what}: with {micro} sample{'s' if micro > 1 else ''} on a rank at a time there is "
            f"too little to compute meanwhile. Remedy: raise train_micro_batch_size_per_gpu (now "
            f"{micro}), with torch.utils.checkpoint if activations do not fit, and lower "
            f"gradient_accumulation_steps (now {self._settings.accumulation_steps}); or stage 2, if "
            f"parameters fit the device"
        )
