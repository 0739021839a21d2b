"""`TieredOptimizer`: a real `torch.optim.Optimizer` over tiers; what all of them have in common."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tiermem.config import TierConfig
from tiermem.errors import ConfigError, StateError
from tiermem.optim.control import StepControl
from tiermem.optim.options import OptionIndex
from tiermem.optim.saving import load_state, pack_state
from tiermem.optim.state import LazyState, LazyStates
from tiermem.zero import compat
from tiermem.zero.access import find_handle, full_master, set_full_master
from tiermem.zero.attach import attach_optimizer
from tiermem.zero.group import ParamGroup
from tiermem.zero.group_gradient import GroupGradient
from tiermem.zero.interrupts import uninterrupted
from tiermem.zero.param import ShardedParam
from tiermem.zero.rule import UpdateRule
from tiermem.zero.runtime import Runtime
from tiermem.zero.state_views import StateView
from tiermem.zero.update import PendingUpdate

_UPDATED = (torch.float32, torch.bfloat16, torch.float16)


class TieredOptimizer(torch.optim.Optimizer, ABC):
    """An element-wise optimizer on sharded parameters. ``params`` are parameters of one or more models
    sharded on one runtime, float32, bfloat16 or float16; the 16-bit ones have fp32 masters.

    ``step()`` fixes what the update uses and returns; the update itself runs under the next forward
    (``update: deferred``) or ran inside backward (``update: backward``). Anything that reads a
    parameter or a state sees it updated.
    """

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, runtime: Runtime | None = None
    ) -> None:
        self._rule: UpdateRule | None = None
        self._runtime = runtime
        self._handles: dict[int, ShardedParam] = {}
        self._options = OptionIndex(self._handle_of)
        self._frozen: dict[ParamGroup, dict[int, Any]] = {}  # what the last updates use
        self._control = StepControl(self)
        self._check_options(defaults)
        super().__init__(params, defaults)
        self.state = LazyStates(  # type: ignore[assignment]
            self._all_params, self._state_of
        )

    # ---- what each optimizer says of itself

    @abstractmethod
    def _make_rule(self, config: TierConfig) -> UpdateRule:
        """Its arithmetic and states; called once, when the first parameters come."""

    @abstractmethod
    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for options of a parameter group that cannot work."""

    @abstractmethod
    def _hyper(self, param: ShardedParam, options: Mapping[str, Any], scale: float) -> Any:
        """Everything that the update number ``param.steps`` uses, frozen; gradients are multiplied by
        ``scale``. Equal if the options are."""

    def _same(self, param: ShardedParam, options: Mapping[str, Any], used: Any) -> bool:
        """Whether the update that used ``used`` would be the same with ``options``."""
        return bool(self._hyper(param, options, 1.0) == used)

    def _counted(self, param: ShardedParam, hyper: Any) -> Any:
        """The update number ``param.steps`` is sure to come; what it uses, perhaps with more."""
        del param
        return hyper

    def _scalars(self, param: ShardedParam) -> dict[str, Any]:
        """Of ``state[param]``: what is one number for the whole parameter."""
        return {"step": torch.tensor(float(param.steps))}

    def _load_scalars(self, param: ShardedParam, saved: Mapping[str, Any] | None) -> None:
        """Takes them from a saved state; without one the parameter starts anew."""
        param.steps = 0 if saved is None else int(saved["step"])

    @property
    def _number_keys(self) -> tuple[str, ...]:
        """What a saved state must have, beside what the rule's views show."""
        return ("step",)

    # ---- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; those without gradients (frozen) get no states."""
        self._check_options({**self.defaults, **param_group})
        before = {id(p) for group in self.param_groups for p in group["params"]}
        super().add_param_group(param_group)
        try:
            self._adopt([p for p in self.param_groups[-1]["params"] if id(p) not in before])
        except BaseException:
            self.param_groups.pop()
            raise

    def _adopt(self, fresh: Sequence[torch.Tensor]) -> None:
        runtime = self._find_runtime(fresh)
        touched: dict[ParamGroup, None] = {}
        for param in fresh:
            handle = runtime.resolve(param)
            self._handles[id(param)] = handle
            if handle.real.requires_grad and handle.real.dtype not in _UPDATED:
                raise ConfigError(
                    f"{handle.name!r} has dtype {handle.real.dtype}; {type(self).__name__} updates "
                    f"float32, bfloat16 and float16. Remedy: compute_dtype: 'bf16', 'fp16' or 'fp32', "
                    f"or freeze it"
                )
            if runtime.updates.owners.get(handle.group) is not self:
                touched[handle.group] = None
            if handle.real.requires_grad and handle.real.dtype == torch.float16:
                self._control.scale_losses()
        if runtime.config.scales_loss:
            self._control.scale_losses()
        with runtime.interrupts:
            attach_optimizer(runtime, self, self.rule, list(touched))

    def _find_runtime(self, params: Iterable[torch.Tensor]) -> Runtime:
        if self._runtime is None:
            for handle in map(find_handle, params):
                if handle is not None:
                    self._runtime = handle.group.runtime
                    break
            else:
                raise StateError(
                    "none of these parameters is sharded. Remedy: tiermem.shard(model, runtime) before "
                    "the optimizer is made, and model.parameters() taken after it (what was collected "
                    "before shard() is not what the model holds now, nor is what fully_shard() or "
                    "parallelize_module() has put in its place); with tiermem.initialize, "
                    f"optimizer=lambda params: tiermem.optim.{type(self).__name__}(params, ...); "
                    "torch.optim.AdamW for ordinary parameters"
                )
        return self._runtime

    @property
    def runtime(self) -> Runtime:
        """The runtime of its parameters."""
        assert self._runtime is not None
        return self._runtime

    def groups(self) -> list[ParamGroup]:
        """The groups that it updates."""
        return [g for g in self.runtime.groups if self.runtime.updates.owners.get(g) is self]

    # ---- the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step with the gradients accumulated so far; see the class."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @uninterrupted
    def _take_step(self) -> None:
        runtime = self.runtime
        runtime.backward.forget_stale()
        runtime.check_usable()
        updates = runtime.updates
        runtime.reducer.flush()
        if updates.in_backward:
            self._check_unchanged()
        fresh = [g for g in self.groups() if g.gradient is not None and g.gradient.present]
        if fresh and self._control.skips():
            fresh = []
        for group in self.groups():
            if (group.pending is not None or group.owed) and group not in updates.updated:
                runtime.gather.apply_pending([group])
        for group in fresh:
            updates.freeze(group, self)
        updates.stepped(self)
        runtime.reducer.stepped()
        self._frozen.clear()
        runtime.forward.pass_over = True
        runtime.gather.prefetch(next_pass=True)

    @property
    def rule(self) -> UpdateRule:
        """See `tiermem.zero.updates.OptimizerLink`."""
        if self._rule is None:
            self._rule = self._make_rule(self.runtime.config)
        return self._rule

    def freeze(self, group: ParamGroup, gradient: GroupGradient) -> PendingUpdate:
        """See `tiermem.zero.updates.OptimizerLink`."""
        hyper = {}
        scale = gradient.scale * self._control.unscale
        for param in group.params:
            if param.index in gradient.present:
                options = self._options_of(param)
                if options is not None:
                    param.steps += 1
                    used = self._hyper(param, options, scale)
                    hyper[param.index] = self._counted(param, used)
        self._frozen[group] = hyper
        return PendingUpdate(self.rule, hyper, gradient)

    def _options_of(self, param: ShardedParam) -> Mapping[str, Any] | None:
        return self._options.find(self.param_groups, param)

    def _handle_of(self, param: torch.Tensor) -> ShardedParam:
        handle = self._handles.get(id(param))
        if handle is None:
            raise StateError(
                f"param_groups hold a tensor of shape {tuple(param.shape)} that this optimizer was not "
                f"given. Remedy: optimizer.add_param_group({{'params': ...}}), which gives it states"
            )
        return handle

    def _check_unchanged(self) -> None:
        """Inside-backward updates have used the options as they were during backward."""
        for group, hyper in self._frozen.items():
            for index, used in hyper.items():
                options = self._options_of(group.params[index])
                if options is None or not self._same(group.params[index], options, used):
                    raise StateError(
                        "an option of the optimizer (such as lr, or what its groups hold) was changed "
                        "between backward and step(), but update: 'backward' has used it already. "
                        "Remedy: change it before backward (schedulers: after step()), or update: "
                        "'deferred'"
                    )

    @uninterrupted
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that no ``step()`` has taken."""
        self.runtime.backward.forget_stale()
        self.runtime.check_usable()
        self.runtime.updates.check_discard(self)
        for group in self.groups():
            self.runtime.gradients.discard(group)
            self.runtime.reducer.discard(group)
            for param in group.params:
                param.real.grad = None

    def state_comes(self, param: ShardedParam) -> None:
        """A state of ``param`` is about to be set from outside. Raises `StateError` if it has none yet
        that could be."""
        del param

    def gradients_come(self) -> None:
        """Gradients are set from outside, as those of scaled losses."""
        self._control.gradients_come()

    # ---- all gradients together

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, in fp32: ``optimizer.scale(loss).backward()``. As it is where
        losses are not scaled."""
        return loss if self._control.scaler is None else self._control.scaler.apply(loss)

    @property
    def loss_scale(self) -> float:
        """What `scale` multiplies by; it changes in ``step()`` only. 1.0 without loss scaling."""
        return self._control.loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last ``step()`` was skipped since a gradient was not finite."""
        return self._control.scaler is not None and self._control.scaler.overflow

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far."""
        return 0 if self._control.scaler is None else self._control.scaler.skipped_steps

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales the next step's gradients so that their global 2-norm is at most ``max_norm``.

        Returns the norm before clipping (fp64 scalar), of gradients without their loss scale; it stays
        readable as `last_grad_norm`, the one after it as `last_clipped_norm`. The factor is
        ``min(1, max_norm / (norm + 1e-6))``, applied in fp32 inside the update. Squares are summed
        in fp64 in an order that does not depend on placement. After an overflow, which ``step()`` will
        skip, the norm is not finite. Raises `StateError` with ``update: 'backward'``.
        """
        norm = self._control.clip(max_norm, error_if_nonfinite=error_if_nonfinite)
        return torch.tensor(norm, dtype=torch.float64)

    def grad_norm(self) -> float:
        """The 2-norm over all gradients that the next ``step()`` would use, without their loss scale;
        over several ranks one exchange of a number for each communicator."""
        return self._control.grad_norm()

    @property
    def last_grad_norm(self) -> float | None:
        """The last norm that was computed, before clipping; None before the first."""
        return self._control.norm

    @property
    def last_clipped_norm(self) -> float | None:
        """The same after clipping; where nothing was clipped it is the same number."""
        return self._control.clipped_norm

    def counts(self, param: ShardedParam) -> bool:
        """Whether ``param`` is in one of the groups."""
        return self._options_of(param) is not None

    # ---- state

    def _all_params(self) -> list[torch.Tensor]:
        return list(itertools.chain.from_iterable(g["params"] for g in self.param_groups))

    def _state_of(self, param: torch.Tensor) -> LazyState | None:
        handle = self._handles.get(id(param))
        if handle is None or handle.steps == 0:
            return None
        return LazyState(self._loaders(handle))

    def _loaders(self, param: ShardedParam) -> dict[str, Callable[[], Any]]:
        region = param.region

        def read(view: StateView) -> torch.Tensor:
            with self.runtime.interrupts:
                self.runtime.check_usable()
                self.runtime.gather.apply_pending([param.group])
                return view.read(self.runtime, region, param)

        loaders: dict[str, Callable[[], Any]] = {
            key: functools.partial(_copy, value) for key, value in self._scalars(param).items()
        }
        for view in self.rule.views:
            loaders[view.key] = functools.partial(read, view)
        if region.master is not None:
            loaders["master"] = lambda: full_master(param.placeholder)
        return loaders

    def state_dict(self) -> dict[str, Any]:
        """torch's shape: ``{"state": {index: ...}, "param_groups": [...]}``. States are read from
        their tier when they are looked at (see `LazyState`), as they are then. Over several ranks
        all of them look at the same ones in the same order; ``copy.deepcopy`` looks at all."""
        for before in compat.state_dict_hooks(self, "before save"):
            before(self)
        params = self._all_params()
        state_dict = pack_state(self.param_groups, lambda i: self._state_of(params[i]))
        if self._control.scaler is not None:
            state_dict["loss_scale"] = self._control.scaler.state_dict()
        for after in compat.state_dict_hooks(self, "after save"):
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state of this class or of torch's own over the same parameters in the same
        order. ``master`` (fp32), where present, becomes the master and the parameter."""
        state_dict = dict(state_dict)  # for hooks to change, as in torch
        for before in compat.state_dict_hooks(self, "before load"):
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for after in compat.state_dict_hooks(self, "after load"):
            after(self)

    @uninterrupted
    def _load(self, state_dict: Mapping[str, Any]) -> None:
        handles = [self._handles[id(param)] for param in self._all_params()]
        tensors = [view.key for view in self.rule.views]
        loaded = load_state(self.param_groups, handles, state_dict, tensors, self._number_keys)
        for group, options in zip(self.param_groups, loaded.options, strict=True):
            self._check_options({**group, **options})
        self.runtime.drain()
        for group, options in zip(self.param_groups, loaded.options, strict=True):
            group.update(options)
        if self._control.scaler is not None and "loss_scale" in state_dict:
            self._control.scaler.load_state_dict(state_dict["loss_scale"])
        for handle in handles:
            self._load_one(handle, loaded.states.get(handle))

    def _load_one(self, param: ShardedParam, saved: Mapping[str, Any] | None) -> None:
        """Takes one parameter's state; without one it starts anew, as in torch."""
        region = param.region
        for view in self.rule.views:
            view.write(self.runtime, region, param, None if saved is None else saved[view.key])
        if saved is not None and "master" in saved and region.master is not None:
            set_full_master(param.placeholder, saved["master"])
        self._load_scalars(param, saved)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
