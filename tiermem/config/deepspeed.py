"""`read_deepspeed`: a DeepSpeed configuration, checked and translated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tiermem.config.batch import BatchSizes
from tiermem.config.deepspeed_named import NamedBlock, read_optimizer, read_scheduler
from tiermem.config.deepspeed_reading import Reading
from tiermem.config.deepspeed_tier import Effective, Precision, Translation
from tiermem.config.text import read_json
from tiermem.config.tier import LossScaleConfig, TierConfig, explain
from tiermem.config.vocabulary import refuse_mixture
from tiermem.errors import ConfigError

_ZERO = "zero_optimization"
_LEAF = f"{_ZERO}.leaf_module"


@dataclass(frozen=True, slots=True)
class LeafModules:
    """Modules that are to be gathered as a whole, by class, name, or the end of a name."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """All that a DeepSpeed configuration says, in terms of what acts here."""

    tier: TierConfig
    batch: BatchSizes
    optimizer: NamedBlock | None
    scheduler: NamedBlock | None
    precision: Precision | None
    """What parameters are cast to; None: the model's own."""
    loss_scale: LossScaleConfig | None
    """The block ``fp16`` where ``enabled`` is "auto": for a model that is fp16 (see `tier_for`)."""
    gradient_clipping: float
    """Largest global norm; 0 is none."""
    steps_per_print: int | None
    drop_last: bool
    leaf_modules: LeafModules | None
    notes: tuple[str, ...]
    """To be logged once: old names, keys without effect, what "auto" became."""
    effective: dict[str, Any]
    """For each acting key that was given: an `Effective`, to be printed."""

    def tier_for(self, batch: BatchSizes, *, model_precision: str | None = None) -> TierConfig:
        """`tier` with micro-steps and clipping declared, for resolved batch sizes.

        ``model_precision``: that of the model's parameters; for ``"fp16"`` losses are scaled where the
        configuration leaves the choice to the model. Raises `ConfigError`.
        """
        if batch.accumulation is None:
            raise ConfigError("the batch sizes are not resolved; call BatchSizes.resolve(world_size)")
        values = self.tier.model_dump(exclude_unset=True)
        values["gradient_accumulation_steps"] = batch.accumulation
        values["gradient_clipping"] = self.gradient_clipping
        if model_precision == "fp16" and self.loss_scale is not None:
            values["fp16"] = self.loss_scale
        return TierConfig.model_validate(values)


def read_deepspeed(
    source: Mapping[str, Any] | str | Path, *, itemsize: int | None = None
) -> DeepSpeedConfig:
    """A DeepSpeed configuration from a mapping or the path of a JSON file.

    ``itemsize``: bytes of one of the model's parameters, for sizes in elements where the configuration
    leaves the precision to the model (4 if not given). Raises `ConfigError` that lists every problem.
    """
    if isinstance(source, (str, Path)):
        source = read_json(Path(source))
    if not isinstance(source, Mapping):
        raise ConfigError(f"a DeepSpeed configuration is a mapping or a path, not {source!r}")
    refuse_mixture(source)
    reading = Reading()
    reading.read(source)
    optimizer, scheduler = read_optimizer(reading), read_scheduler(reading)
    translation = Translation(reading, itemsize)
    tier = translation.tier()
    loss_scale = _undecided_loss_scale(translation)
    if reading.problems or tier is None:
        raise ConfigError(_listed(reading.problems))
    return DeepSpeedConfig(
        tier=tier,
        batch=BatchSizes(
            reading.of("train_batch_size"),
            reading.of("train_micro_batch_size_per_gpu"),
            reading.of("gradient_accumulation_steps"),
        ),
        optimizer=optimizer,
        scheduler=scheduler,
        precision=translation.precision,
        loss_scale=loss_scale,
        gradient_clipping=reading.of("gradient_clipping", 0.0),
        steps_per_print=reading.of("steps_per_print") or None,
        drop_last=reading.of("dataloader_drop_last", False),
        leaf_modules=_leaf_modules(reading),
        notes=(*reading.notes, *_auto_note(reading)),
        effective=_with_named(translation, optimizer, scheduler),
    )


def for_runtime(source: Mapping[str, Any]) -> tuple[TierConfig, tuple[str, ...]]:
    """What a `Runtime` takes of a DeepSpeed configuration, and what is to be logged about it."""
    config = read_deepspeed(source)
    for_engine = {
        "optimizer": config.optimizer,
        "scheduler": config.scheduler,
        "train_batch_size": config.batch.train,
        "train_micro_batch_size_per_gpu": config.batch.micro,
        "steps_per_print": config.steps_per_print,
        "dataloader_drop_last": config.drop_last,
        _LEAF: config.leaf_modules,
        "gradient_clipping (clip in your loop)": config.gradient_clipping,
    }
    unread = [name for name, value in for_engine.items() if value]
    notes = config.notes
    if unread:
        notes = (*notes, f"{', '.join(unread)}: done by tiermem.initialize only, not by a Runtime")
    return config.tier, notes


def _listed(problems: list[str]) -> str:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return f"{count} in the DeepSpeed configuration:\n  " + "\n  ".join(problems)


def _undecided_loss_scale(translation: Translation) -> LossScaleConfig | None:
    if "fp16.enabled" not in translation.reading.auto or translation.precision is not None:
        return None
    try:
        return LossScaleConfig.model_validate(translation.loss_scale)
    except ValidationError as error:
        for problem in error.errors():
            text = explain(dict(problem) | {"loc": ("fp16", *problem["loc"])})
            translation.reading.problems.append(text)
        return None


def _leaf_modules(reading: Reading) -> LeafModules | None:
    if not any(name.startswith(f"{_LEAF}.") for name in reading.values):
        return None
    return LeafModules(
        *(reading.of(f"{_LEAF}.{which}", ()) for which in ("classes", "names", "name_suffixes"))
    )


def _auto_note(reading: Reading) -> tuple[str, ...]:
    became = "; ".join(f"{name}: {value}" for name, value in reading.auto.items())
    return (f'"auto" stands for: {became}',) if became else ()


def _with_named(translation: Translation, *blocks: NamedBlock | None) -> dict[str, Any]:
    """What acts, with the types and arguments of what is to be made."""
    values, given = dict(translation.effective), translation.reading.given
    for name, block in zip(("optimizer", "scheduler"), blocks, strict=True):
        if block is None:
            continue
        values[f"{name}.type"] = Effective(block.type, given[f"{name}.type"])
        for param, value in block.params.items():
            full = f"{name}.params.{param}"
            if full in given:
                values[full] = Effective(value, given[full])
    return values
