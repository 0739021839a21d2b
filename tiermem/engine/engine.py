"""`Engine`: a model, its optimizer and its schedule behind the methods that DeepSpeed's engine has.

[Note: engine steps] A *micro-step* is one ``engine(batch)``, ``engine.backward(loss)`` and
``engine.step()``. Gradients are means: over the ranks, and over the ``gradient_accumulation_steps``
micro-steps of one step, since ``backward`` divides the loss by their number. ``step()`` does something
only at the boundary, in this order: norm and clipping, the optimizer's step (skipped after an fp16
overflow), the gradients are forgotten, the schedule's step (not after an overflow).
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem.engine.advice import WaitWatch
from tiermem.engine.settings import Settings, rank_in
from tiermem.errors import StateError
from tiermem.optim import TieredOptimizer
from tiermem.zero.runtime import Runtime
from tiermem.zero.syncing import no_sync

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_LATER = {
    "save_checkpoint": "on all ranks state = {'model': engine.module.state_dict(), 'optimizer': "
    "copy.deepcopy(engine.optimizer.state_dict()), 'schedule': engine.lr_scheduler.state_dict(), "
    "'steps': engine.global_steps}, and on the first torch.save(state, path)",
    "load_checkpoint": "on all ranks load_state_dict of engine.module, engine.optimizer and "
    "engine.lr_scheduler, and engine.global_steps = ...",
    "save_16bit_model": "state = engine.module.state_dict() on all ranks, torch.save on the first",
}
"""What DeepSpeed's engine has and this one does not, and what to do instead."""


class Engine(nn.Module):
    """What `tiermem.initialize` gives; see [Note: engine steps]. ``engine(...)`` calls the model,
    ``engine.module`` is it, and attributes that the engine lacks are the model's (``engine.generate``).

    The runtime below it ends with `close` (DeepSpeed's ``destroy``), or with the ``with`` block that
    the engine may be used as; at the end of the process it is given up, with what was pending. A
    runtime that was given to `tiermem.initialize` is the caller's.
    """

    def __init__(
        self,
        module: nn.Module,
        runtime: Runtime,
        settings: Settings,
        optimizer: TieredOptimizer | None,
        lr_scheduler: LRScheduler | None,
        *,
        owns_runtime: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self.runtime = runtime
        self.settings = settings
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self._boundary: bool | None = None
        self._applied = False
        self._norm: float | None = None
        self._watch = WaitWatch(runtime, settings)
        self._owns_runtime = owns_runtime
        if owns_runtime:
            atexit.register(_give_up, weakref.ref(runtime))

    # ---- the three calls of a micro-step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backward of ``loss``, a scalar, divided by the accumulation steps (``scale_wrt_gas``) and,
        for fp16, scaled. Returns the divided loss, without the loss scale."""
        optimizer = self._optimizer_for("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise StateError(
                f"backward() takes a loss of one element, not {shape}. Remedy: loss.mean()"
            )
        micro_steps = self.gradient_accumulation_steps()
        if scale_wrt_gas and micro_steps > 1:
            loss = (loss if loss.dtype == torch.float64 else loss.float()) / micro_steps
        torch.autograd.backward(optimizer.scale(loss), retain_graph=retain_graph)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary of accumulation the step itself; otherwise it counts the micro-step.
        ``lr_kwargs`` go to the schedule's ``step``."""
        optimizer = self._optimizer_for("step")
        boundary = self.is_gradient_accumulation_boundary()
        self._applied = False
        self.micro_steps += 1  # also if what follows raises: the micro-step is over
        self.global_samples += self.train_micro_batch_size_per_gpu() * self.settings.world_size
        if boundary:
            self._take_step(optimizer, lr_kwargs or {})

    def _take_step(self, optimizer: TieredOptimizer, lr_kwargs: dict[str, Any]) -> None:
        if self.settings.gradient_clipping > 0:
            self._norm = float(optimizer.clip_grad_norm_(self.settings.gradient_clipping))
        elif not self.runtime.updates.in_backward:
            self._norm = optimizer.grad_norm()
        optimizer.step()
        optimizer.zero_grad()
        self.global_steps += 1
        self._applied = not optimizer.overflow
        self._watch.stepped(self.global_steps)
        if self.lr_scheduler is not None and self._applied:
            self.lr_scheduler.step(**lr_kwargs)
        every = self.settings.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            logger.info(
                "step %d, skipped %d, lr %s, gradient norm %s, loss scale %g",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self._norm,
                self.loss_scale,
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-step that is under way is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on every micro-step is a boundary, or none is; for loops that count themselves."""
        self._boundary = bool(is_boundary)

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated parameters: it was a boundary, without an overflow."""
        return self._applied

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `tiermem.no_sync`."""
        with no_sync(self.module):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that no step has taken."""
        self._optimizer_for("zero_grad").zero_grad(set_to_none)

    def _optimizer_for(self, what: str) -> TieredOptimizer:
        if self.optimizer is None:
            raise StateError(
                f"{what}() needs an optimizer, and this engine has none. Remedy: an 'optimizer' block "
                f"in the configuration, or initialize(optimizer=...); trainable parameters in the model"
            )
        return self.optimizer

    # ---- what it is set to

    def train_batch_size(self) -> int:
        """Samples of one step, over all ranks."""
        return self.settings.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one micro-step on this rank."""
        return self.settings.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of one step."""
        return self.settings.accumulation_steps

    def gradient_clipping(self) -> float:
        """The largest norm of a step's gradients; 0: not clipped."""
        return self.settings.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.runtime.config.stage

    def zero_optimization(self) -> bool:
        return self.runtime.config.stage > 0

    def fp16_enabled(self) -> bool:
        return self.settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.settings.precision == "bf16"

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [float(group["lr"]) for group in groups]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every parameter group."""
        for group in self._optimizer_for("set_lr").param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """``betas`` or ``momentum`` of each parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients, before clipping and without the loss scale; None
        before the first step, and where updates run inside backward."""
        return self._norm

    @property
    def loss_scale(self) -> float:
        """Of the next loss; 1 without loss scaling."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    @property
    def skipped_steps(self) -> int:
        """Steps that an overflow has skipped."""
        return 0 if self.optimizer is None else self.optimizer.skipped_steps

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    @property
    def global_rank(self) -> int:
        return rank_in(None)

    @property
    def local_rank(self) -> int:
        return self.settings.local_rank

    @property
    def world_size(self) -> int:
        """Ranks that share out the data."""
        return self.settings.world_size

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's ``state_dict``; looked at on all ranks alike."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Loads the model's parameters, on all ranks alike."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        if name in _LATER:
            raise AttributeError(f"engine.{name} is not built yet. Until then: {_LATER[name]}")
        try:
            return getattr(self.module, name)
        except AttributeError:
            model = type(self.module).__name__
            raise AttributeError(f"neither the engine nor its {model} has {name!r}") from None

    # ---- the end

    def close(self) -> None:
        """Applies what is pending and closes the runtime, if it is the engine's own. Idempotent."""
        if self._owns_runtime:
            self.runtime.close()

    destroy = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._owns_runtime:
            self.runtime.__exit__(kind, error, traceback)


def _give_up(of: weakref.ref[Runtime]) -> None:
    runtime = of()
    if runtime is not None:
        runtime.abandon()
