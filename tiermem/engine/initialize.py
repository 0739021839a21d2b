"""`initialize`: DeepSpeed's way to start, and what programs written for it call around it."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tiermem.config import DeepSpeedConfig, LeafModules, read_deepspeed
from tiermem.engine.building import make_optimizer, plan_states
from tiermem.engine.engine import Engine
from tiermem.engine.loader import EpochLoader
from tiermem.engine.parameters import Replacement, listed
from tiermem.engine.schedules import make_schedule
from tiermem.engine.settings import on_device, rank_in, settings_of
from tiermem.errors import ConfigError, StateError
from tiermem.optim import TieredOptimizer
from tiermem.zero.leaf_modules import set_z3_leaf_module, set_z3_leaf_modules
from tiermem.zero.rule import StatePlan
from tiermem.zero.runtime import Runtime, device_of
from tiermem.zero.shard import shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

logger = logging.getLogger(__name__)

_SPELLED = {"fp32": "fp32", "float": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
    *,
    runtime: Runtime | None = None,
    mesh: DeviceMesh | None = None,
    wrap: Any = None,
) -> tuple[Engine, TieredOptimizer | None, EpochLoader | None, LRScheduler | None]:
    """Shards ``model`` as a DeepSpeed configuration says and gives it an engine, an optimizer, a loader
    of ``training_data`` and a schedule: ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    ``config`` is a DeepSpeed configuration, a mapping or a JSON file (``config_params`` and
    ``args.deepspeed_config`` are older ways to give it). ``optimizer`` is one of torch or anybody over
    the model's parameters, made before, which is converted with its options and state and is not to be
    used itself any more; or a function that makes one from parameters; or None for the configuration's
    ``optimizer``, over ``model_parameters`` (default: all that are trainable). ``lr_scheduler`` is one
    made for that optimizer, a function that makes one, or None for the configuration's. Under a
    launcher ``torch.distributed`` is initialised with gloo, unless it was
    (``dist_init_required=False``: not).

    Three arguments are not DeepSpeed's: ``runtime`` is one to share with other models, whose tiers and
    budgets then hold; ``mesh`` the dimension of a `DeviceMesh` to shard over; ``wrap`` as for
    `tiermem.shard`.

    Raises `ConfigError` with everything that is wrong with the configuration, and for an optimizer that
    cannot run sharded, before the model is touched; and what `tiermem.Runtime` and `tiermem.shard`
    raise.
    """
    source = _source(args, config, config_params)
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize needs model=, a torch.nn.Module, not a {type(model).__name__}")
    if mpu is not None or mesh_param is not None:
        raise ConfigError(
            "mpu and mesh_param are not understood. Remedy: mesh=device_mesh['dp'], the dimension of a "
            "torch.distributed DeviceMesh to shard over"
        )
    if distributed_port is not None:
        logger.info("distributed_port has no effect: the launcher's MASTER_PORT counts")
    if dist_init_required is not False:
        init_distributed()
    itemsizes = [p.dtype.itemsize for p in model.parameters() if p.dtype.is_floating_point]
    read = read_deepspeed(source, itemsize=max(itemsizes, default=4))
    if rank_in(None) == 0:
        for note in read.notes:
            logger.warning("DeepSpeed configuration: %s", note)
        for key, value in read.effective.items():
            logger.info("%s acts as %s", key, value)
    precision = read.precision or _precision(model) if runtime is None else _of_runtime(runtime, model)
    settings = settings_of(read, mesh, precision)
    parameters = None if model_parameters is None else listed(model_parameters)
    job = _Job(model, read, optimizer, parameters, Replacement(model), lr_scheduler)
    states = job.check(precision)
    loader = None
    if training_data is not None:
        loader = EpochLoader(
            training_data,
            settings.micro_batch_size,
            rank=rank_in(mesh),
            world_size=settings.world_size,
            drop_last=read.drop_last,
            collate_fn=collate_fn,
        )
    own = runtime is None
    if runtime is None:
        batch = read.batch.resolve(settings.world_size)
        tier = read.tier_for(batch, model_precision=precision)
        runtime = Runtime(on_device(tier, device_of(tier).type))
    try:
        job.shard(runtime, mesh, wrap, states)
        made = job.optimizer(runtime)
        schedule = job.schedule(made)
    except BaseException as error:
        if own:
            runtime.__exit__(type(error), error, error.__traceback__)
        raise
    engine = Engine(model, runtime, settings, made, schedule, owns_runtime=own)
    engine.training_dataloader = loader
    return engine, made, loader, schedule


@dataclass(frozen=True, slots=True)
class _Job:
    """What `initialize` was given to train."""

    model: nn.Module
    config: DeepSpeedConfig
    given: Optimizer | Callable[[list[Any]], Optimizer] | None
    parameters: list[Any] | None
    replacement: Replacement
    given_schedule: LRScheduler | Callable[[Optimizer], LRScheduler] | None

    def check(self, precision: str | None) -> StatePlan:
        """Finds what can be found before the model is touched; returns what the optimizer will keep.
        Raises `ConfigError`, `StateError`."""
        states = plan_states(self.given, self.config)
        self.replacement.check(self.parameters or ())
        if isinstance(self.given, Optimizer):
            self.replacement.check(self.given.param_groups)
        self._check_schedule()
        for key in ("communication_data_type", "data_types.grad_accum_dtype"):
            if key in self.config.effective:
                asked = self.config.effective[key].given
                if _SPELLED.get(str(asked).lower(), precision) not in ("fp32", precision):
                    raise ConfigError(
                        f"{key} is {asked!r}, and the model's parameters are {precision}: it must be "
                        f"fp32 or the same as they are"
                    )
        return states

    def _check_schedule(self) -> None:
        block, given = self.config.scheduler, self.given_schedule
        if given is None and (block is None or not self._trainable):
            return
        if not self._trainable or (self.given is None and self.config.optimizer is None):
            raise StateError(
                "there is a learning rate schedule and no optimizer. Remedy: an 'optimizer' block in "
                "the configuration, or initialize(optimizer=...), and trainable parameters in the model"
            )
        if given is None:
            assert block is not None
            make_schedule(block.type, block.params, self._stand_in())
        of = getattr(given, "optimizer", None)
        if not isinstance(given, type) and isinstance(of, Optimizer) and of is not self.given:
            raise StateError(
                f"lr_scheduler= is a {type(given).__name__} of another optimizer than the one given, "
                f"and would have no effect. Remedy: initialize(optimizer=...) with the one that it was "
                f"made for, or lr_scheduler=lambda optimizer: {type(given).__name__}(optimizer, ...)"
            )

    @property
    def _trainable(self) -> bool:
        return any(p.requires_grad for p in self.model.parameters())

    def _stand_in(self) -> Optimizer:
        """An optimizer with as many groups as the real one will have, to try a schedule on."""
        if isinstance(self.given, Optimizer):
            groups: list[Any] = self.given.param_groups
        else:
            groups = [g for g in self.parameters or () if isinstance(g, dict)] or [{}]
        betas = {"betas": (0.9, 0.999), "lr": 1e-3}
        shown = [{k: g[k] for k in ("lr", "betas") if k in g} for g in groups]
        leaves = [torch.zeros(1, requires_grad=True) for _ in groups]
        return torch.optim.AdamW(
            [{**betas, **g, "params": [leaf]} for g, leaf in zip(shown, leaves, strict=True)]
        )

    def schedule(self, optimizer: TieredOptimizer | None) -> LRScheduler | None:
        """The learning rate schedule of the optimizer that was made."""
        given, block = self.given_schedule, self.config.scheduler
        if optimizer is None or (given is None and block is None):
            return None
        if given is None:
            assert block is not None
            return make_schedule(block.type, block.params, optimizer)
        if isinstance(given, type) or not hasattr(given, "step"):
            return cast("Callable[[Optimizer], LRScheduler]", given)(optimizer)
        return cast("LRScheduler", given)

    def shard(self, runtime: Runtime, mesh: DeviceMesh | None, wrap: Any, states: StatePlan) -> None:
        """Shards the model. What the user gave refers to its parameters: no reason for a warning."""
        if self.config.leaf_modules is not None:
            _mark_leaves(self.model, self.config.leaf_modules)
        with warnings.catch_warnings():
            if self.given is not None or self.parameters is not None:
                warnings.filterwarnings("ignore", message="parameters collected before")
            shard(self.model, runtime, mesh=mesh, wrap=wrap, states=states)

    def optimizer(self, runtime: Runtime) -> TieredOptimizer | None:
        """The optimizer of the sharded model; None if nothing says which, or nothing is trainable."""
        if self.parameters is not None:
            parameters = self.replacement.of_all(self.parameters)
        else:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
        return make_optimizer(self.given, self.config, parameters, self.replacement, runtime)


def init_distributed(
    dist_backend: str = "gloo", auto_mpi_discovery: bool = False, **options: Any
) -> None:
    """Initialises ``torch.distributed`` under a launcher (torchrun: ``WORLD_SIZE`` is set), unless that
    was done; a process alone needs none. ``options`` go to `torch.distributed.init_process_group`.
    Exchanges use gloo, whatever backend computes, so ``"nccl"`` is made ``"cpu:gloo,cuda:nccl"``."""
    if auto_mpi_discovery:
        raise ConfigError("auto_mpi_discovery is not understood. Remedy: start with torchrun")
    if not dist.is_available() or dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        return
    backend = "cpu:gloo,cuda:nccl" if dist_backend == "nccl" else dist_backend
    dist.init_process_group(backend, **options)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config FILE``, as programs for DeepSpeed expect them."""
    group = parser.add_argument_group("tiermem", "DeepSpeed's arguments")
    group.add_argument("--deepspeed", action="store_true", help="(for the program itself to look at)")
    group.add_argument("--deepspeed_config", type=str, help="the JSON file for tiermem.initialize")
    return parser


def _source(args: Any, *given: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | str | Path:
    sources = [each for each in given if each is not None]
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None:
        sources.append(from_args)
    if len(sources) != 1:
        raise ConfigError(
            f"initialize takes one configuration, not {len(sources)}. Remedy: config=, a mapping or "
            f"the path of a JSON file; or args.deepspeed_config"
        )
    return sources[0]


def _of_runtime(runtime: Runtime, model: nn.Module) -> str | None:
    """What parameters of ``model`` are on a runtime that is there."""
    return runtime.config.compute_dtype or _precision(model)


def _precision(model: nn.Module) -> str | None:
    """What the model's parameters are, if all are alike."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return _PRECISIONS.get(dtypes.pop()) if len(dtypes) == 1 else None


def _mark_leaves(model: nn.Module, leaves: LeafModules) -> None:
    """The modules that the block ``leaf_module`` names are gathered whole. Raises `ConfigError` for
    what names none."""
    set_z3_leaf_modules(model, leaves.classes)
    for which in (*leaves.names, *leaves.name_suffixes):
        whole = which in leaves.names
        found = [
            module
            for name, module in model.named_modules()
            if name == which or (name.endswith(which) and not whole)
        ]
        if not found:
            raise ConfigError(
                f"zero_optimization.leaf_module: {which!r} is no name, or end of a name, of any module "
                f"in this {type(model).__name__}"
            )
        for module in found:
            set_z3_leaf_module(module, True)
