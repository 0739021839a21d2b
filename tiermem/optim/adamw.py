"""AdamW over tiers, as a real `torch.optim.Optimizer`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tiermem.comm import Communicator
from tiermem.errors import ConfigError, StateError
from tiermem.kernels import AdamWStep, Kernels
from tiermem.optim.options import OptionIndex, check_options
from tiermem.optim.state import MOMENT_KEYS, LazyState, LazyStates, check_state
from tiermem.types import Field
from tiermem.zero import compat
from tiermem.zero.access import full_master, set_full_master
from tiermem.zero.attach import attach_optimizer
from tiermem.zero.gradients import GroupGradient, flatten_like
from tiermem.zero.group import ParamGroup, ShardedParam
from tiermem.zero.interrupts import uninterrupted
from tiermem.zero.placeholder import Placeholder
from tiermem.zero.runtime import Runtime
from tiermem.zero.update import PendingUpdate

_MOMENTS = ((Field.EXP_AVG, torch.float32), (Field.EXP_AVG_SQ, torch.float32))


class AdamWRule:
    """AdamW on fp32 parameters, or on bf16 parameters with a split master (DESIGN: bits(master) =
    (hi << 16) + lo)."""

    def state_fields(self, dtype: torch.dtype) -> tuple[tuple[Field, torch.dtype], ...]:
        if dtype == torch.bfloat16:
            return ((Field.MASTER_LO, torch.int16), *_MOMENTS)
        return _MOMENTS

    def apply(
        self,
        kernels: Kernels,
        hyper: Any,
        param: torch.Tensor,
        states: dict[Field, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        avg, avg_sq = states[Field.EXP_AVG], states[Field.EXP_AVG_SQ]
        if param.dtype == torch.bfloat16:
            kernels.adamw_split(hyper, param, states[Field.MASTER_LO], avg, avg_sq, gradient)
        else:
            kernels.adamw_fp32(hyper, param, avg, avg_sq, gradient)


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on sharded parameters.

    Arguments are those of `torch.optim.AdamW`; ``lr`` may be a tensor. ``params`` are parameters of
    one or more models sharded on one runtime. Parameters are float32 or bfloat16; a bfloat16 one has
    an fp32 master of which its compute copy is the upper half. ``amsgrad`` is not supported.

    ``step()`` fixes what the update uses and returns; the update itself runs under the next forward
    (``update: deferred``) or ran inside backward (``update: backward``). Anything that reads a
    parameter or a state sees it updated. In fp32 the result is bit-equal to
    ``torch.optim.AdamW(fused=True)`` (its vector path; torch's own tails depend on how it slices).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        self._rule = AdamWRule()
        self._runtime = runtime
        self._handles: dict[int, ShardedParam] = {}
        self._options = OptionIndex(self._handle_of)
        self._frozen_scalars: dict[ParamGroup, dict[int, AdamWStep]] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "amsgrad": amsgrad,
        }
        check_options(defaults)
        super().__init__(params, defaults)
        self.state = LazyStates(  # type: ignore[assignment]
            self._all_params, self._state_of
        )

    # ---- parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; those without gradients (frozen) get no states."""
        check_options({**self.defaults, **param_group})
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
            if handle.real.requires_grad and handle.real.dtype not in (torch.float32, torch.bfloat16):
                raise ConfigError(
                    f"{handle.name!r} has dtype {handle.real.dtype}; AdamW updates float32 and "
                    f"bfloat16. Remedy: compute_dtype: 'bf16' or 'fp32', or freeze it"
                )
            if runtime.updates.owners.get(handle.group) is not self:
                touched[handle.group] = None
        with runtime.interrupts:
            attach_optimizer(runtime, self, self._rule, list(touched))

    def _find_runtime(self, params: Iterable[torch.Tensor]) -> Runtime:
        if self._runtime is None:
            for param in params:
                if isinstance(param, Placeholder) and isinstance(param._handle, ShardedParam):
                    self._runtime = param._handle.group.runtime
                    break
            else:
                raise StateError(
                    "none of these parameters is sharded. Remedy: tiermem.shard(model, runtime) before "
                    "the optimizer is made, and model.parameters() taken after it (what was collected "
                    "before shard() is not what the model holds now); torch.optim.AdamW for ordinary "
                    "parameters"
                )
        return self._runtime

    @property
    def _rt(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

    def _groups(self) -> list[ParamGroup]:
        return [g for g in self._rt.groups if self._rt.updates.owners.get(g) is self]

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
        runtime = self._rt
        runtime.backward.forget_stale()
        runtime.check_usable()
        updates = runtime.updates
        runtime.reducer.flush()
        if updates.in_backward:
            self._check_unchanged()
        for group in self._groups():
            if (group.pending is not None or group.owed) and group not in updates.updated:
                runtime.gather.apply_pending([group])
        for group in self._groups():
            if group.gradient is not None and group.gradient.present:
                updates.freeze(group, self)
        updates.stepped(self)
        runtime.reducer.stepped()
        self._frozen_scalars.clear()
        runtime.forward.pass_over = True
        runtime.gather.prefetch(next_pass=True)

    @property
    def rule(self) -> AdamWRule:
        return self._rule

    def freeze(self, group: ParamGroup, gradient: GroupGradient) -> PendingUpdate:
        """See `tiermem.zero.updates.OptimizerLink`."""
        scalars = {}
        for param in group.params:
            if param.index in gradient.present:
                options = self._options_of(param)
                if options is not None:
                    param.steps += 1
                    scalars[param.index] = self._scalars(options, param.steps, gradient.scale)
        self._frozen_scalars[group] = scalars
        return PendingUpdate(self._rule, scalars, gradient)

    def _scalars(self, options: Mapping[str, Any], step: int, scale: float = 1.0) -> AdamWStep:
        beta1, beta2 = options["betas"]
        sign = -1.0 if options["maximize"] else 1.0
        return AdamWStep(
            lr=float(options["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            step=step,
            grad_scale=sign * scale,
        )

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
        for group, scalars in self._frozen_scalars.items():
            for index, used in scalars.items():
                options = self._options_of(group.params[index])
                if options is None or self._scalars(options, used.step) != used:
                    raise StateError(
                        "an option of the optimizer (such as lr, or what its groups hold) was changed "
                        "between backward and step(), but update: 'backward' has used it already. "
                        "Remedy: change it before backward (schedulers: after step()), or update: "
                        "'deferred'"
                    )

    @uninterrupted
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients that no ``step()`` has taken."""
        self._rt.backward.forget_stale()
        self._rt.check_usable()
        self._rt.updates.check_discard(self)
        for group in self._groups():
            self._rt.gradients.discard(group)
            self._rt.reducer.discard(group)
            for param in group.params:
                param.real.grad = None

    def clip_grad_norm_(self, max_norm: float, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales the next step's gradients so that their global 2-norm is at most ``max_norm``.

        Returns the norm before clipping (fp64 scalar). The factor is
        ``min(1, max_norm / (norm + 1e-6))``, applied in fp32 inside the update. Squares are summed
        in fp64 in an order that does not depend on placement. Raises `StateError` with
        ``update: 'backward'``.
        """
        if self._rt.updates.in_backward:
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
        for group in self._groups():
            if group.gradient is not None:
                group.gradient.scale *= factor
        return torch.tensor(norm, dtype=torch.float64)

    def grad_norm(self) -> float:
        """The 2-norm over all gradients that the next ``step()`` would use; over several ranks one
        exchange of a number for each communicator."""
        self._rt.reducer.flush()
        squares: dict[Communicator, list[float]] = {}
        for group in self._groups():
            own = group.gradient
            mine = squares.setdefault(group.sharing.comm, [])
            mine += [
                own.sum_squares[param.index] * own.scale**2
                for param in (group.params if own is not None else ())
                if own is not None and param.index in own.present
                if self._options_of(param) is not None
            ]
        sums = []
        for comm, values in squares.items():
            mine_sum = _sum(values)
            every = comm.gather_values("gradient norm", [mine_sum]) if comm.size > 1 else [(mine_sum,)]
            sums.append(_sum([row[0] for row in every]))
        return math.sqrt(_sum(sums)) if math.isfinite(_sum(sums)) else _sum(sums)

    # ---- state

    def _all_params(self) -> list[torch.Tensor]:
        return list(itertools.chain.from_iterable(g["params"] for g in self.param_groups))

    def _state_of(self, param: torch.Tensor) -> LazyState | None:
        handle = self._handles.get(id(param))
        if handle is None or handle.steps == 0:
            return None
        return LazyState(self._loaders(handle))

    def _loaders(self, param: ShardedParam) -> dict[str, Callable[[], Any]]:
        region = param.group.regions[param.segment.region]

        def read(name: Field) -> torch.Tensor:
            with self._rt.interrupts:
                self._rt.check_usable()
                self._rt.gather.apply_pending([param.group])
                return self._rt.states.read(region, name, param)

        loaders: dict[str, Callable[[], Any]] = {
            "step": lambda: torch.tensor(float(param.steps)),
            "exp_avg": lambda: read(Field.EXP_AVG),
            "exp_avg_sq": lambda: read(Field.EXP_AVG_SQ),
        }
        if Field.MASTER_LO in region.states:
            loaders["master"] = lambda: full_master(param.placeholder)
        return loaders

    def state_dict(self) -> dict[str, Any]:
        """torch's shape: ``{"state": {index: ...}, "param_groups": [...]}``. States are read from
        their tier when they are looked at (see `LazyState`), as they are then."""
        for before in compat.state_dict_hooks(self, "before save"):
            before(self)
        state_dict = self._packed()
        for after in compat.state_dict_hooks(self, "after save"):
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _packed(self) -> dict[str, Any]:
        params = self._all_params()
        groups, start = [], 0
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = list(range(start, start + len(group["params"])))
            start += len(group["params"])
            groups.append(packed)
        states = LazyStates(
            lambda: list(range(len(params))),
            lambda i: self._state_of(params[i]) if 0 <= i < len(params) else None,
        )
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes a state of this class or of `torch.optim.AdamW` over the same parameters in the same
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
        if "param_groups" not in state_dict or "state" not in state_dict:
            raise StateError("a state has the keys 'state' and 'param_groups'; this one lacks some")
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            raise StateError(
                f"the loaded state has parameter groups of sizes "
                f"{[len(group['params']) for group in saved]}, this optimizer has {sizes}"
            )
        for group, loaded in zip(self.param_groups, saved, strict=True):
            check_options({**group, **loaded})
        positions = itertools.chain.from_iterable(group["params"] for group in saved)
        handles = [self._handles[id(param)] for param in self._all_params()]
        found = {
            handle: state_dict["state"][position]
            for position, handle in zip(positions, handles, strict=True)
            if position in state_dict["state"]
        }
        for handle, state in found.items():
            check_state(handle, state)
        self._rt.drain()
        for group, loaded in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in loaded.items() if k != "params"})
        for handle in handles:
            self._load_one(handle, found.get(handle))

    def _load_one(self, param: ShardedParam, saved: Mapping[str, Any] | None) -> None:
        """Takes one parameter's state; without one it starts anew, as in torch."""
        region = param.group.regions[param.segment.region]
        for key, name in MOMENT_KEYS.items():
            if saved is not None:
                self._rt.states.write(region, name, param, _flat(saved[key], param))
            elif name in region.initialised:
                self._rt.states.edit(region, name, param, lambda t: t.zero_())
        if saved is not None and "master" in saved and Field.MASTER_LO in region.states:
            set_full_master(param.placeholder, saved["master"])
        param.steps = int(saved["step"]) if saved is not None else 0


def _sum(values: Sequence[float]) -> float:
    """Rounded once, in any order; not finite if one is not."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _flat(value: torch.Tensor, param: ShardedParam) -> torch.Tensor:
    return flatten_like(value.detach().to(device="cpu", dtype=torch.float32), param.spec.stride)
