"""What DeepSpeed's keys mean in tiermem's own vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from tiermem.config.deepspeed_key import Role
from tiermem.config.deepspeed_keys import TABLE
from tiermem.config.deepspeed_keys_core import OWN_FIELDS
from tiermem.config.deepspeed_reading import Reading
from tiermem.config.deepspeed_value import shown
from tiermem.config.tier import LossScaleConfig, TierConfig, explain

Precision = Literal["bf16", "fp16", "fp32"]

_ZERO = "zero_optimization"
_PARAM = f"{_ZERO}.offload_param"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"
_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
_ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_LOSS_SCALE = tuple(LossScaleConfig.model_fields)
# The planner's own slices have at most so many elements; a larger upper bound changes nothing.
_LARGEST_SUB_GROUP_NUMEL = 1 << 22
_SMALLEST_SUB_GROUP_NUMEL = 4096


@dataclass(frozen=True, slots=True)
class Effective:
    """One key's value as it acts, and as it was given."""

    value: Any
    given: Any
    why: str = ""

    def __str__(self) -> str:
        parts = [f"given {shown(self.given)}"] if shown(self.given) != shown(self.value) else []
        parts += [self.why] if self.why else []
        return shown(self.value) + (f" ({'; '.join(parts)})" if parts else "")


@dataclass(slots=True)
class Translation:
    """Collects `TierConfig`'s values from a reading, and notes its problems there."""

    reading: Reading
    itemsize: int | None
    """Bytes of one parameter, where the configuration leaves the precision to the model."""
    values: dict[str, Any] = field(default_factory=dict)
    effective: dict[str, Effective] = field(default_factory=dict)
    _origin: dict[str, str] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        return int(self.reading.of(f"{_ZERO}.stage", 0))

    @property
    def precision(self) -> Precision | None:
        """What parameters are cast to; None: each keeps its own.

        Both false, or one of them where the other is left out, is fp32, as in DeepSpeed.
        """
        bf16, fp16 = self.reading.of("bf16.enabled"), self.reading.of("fp16.enabled")
        if bf16 or fp16:
            return "bf16" if bf16 else "fp16"
        undecided = any(name in self.reading.auto for name in ("bf16.enabled", "fp16.enabled"))
        return None if undecided or (bf16 is None and fp16 is None) else "fp32"

    @property
    def loss_scale(self) -> dict[str, Any]:
        """What was given of the block ``fp16`` for scaling losses."""
        given = {name: self.reading.of(f"fp16.{name}") for name in _LOSS_SCALE}
        if given["loss_scale"]:
            return {"loss_scale": given["loss_scale"]}  # the rest is about a dynamic scale
        return {name: value for name, value in given.items() if value is not None}

    def tier(self) -> TierConfig | None:
        """The configuration; None with its problems noted."""
        self._start()
        self._precision()
        self._placement()
        self._exchange()
        self._stage3()
        self._io()
        self._own()
        try:
            return TierConfig.model_validate(self.values)
        except ValidationError as error:
            for problem in error.errors():
                text = explain(problem, self._origin)
                if text not in self.reading.problems:
                    self.reading.problems.append(text)
            return None

    def _start(self) -> None:
        """Every acting key acts as it was given, unless it is said otherwise below."""
        late = [name for name in self.reading.auto if TABLE.keys.get(name) and TABLE.keys[name].stage3]
        for name, value in self.reading.values.items():
            key = TABLE.keys.get(name)
            if key is not None and (key.kind == "object" or key.role not in (Role.ACTS, Role.PART)):
                continue
            if key is not None and key.stage3 and self.stage < 3:
                late.append(name)
            elif name.partition(".")[0] not in ("optimizer", "scheduler"):
                self.effective[name] = Effective(value, self.reading.given[name])
        if late and self.stage < 3:
            self.reading.notes.append(f"{', '.join(sorted(late))}: no effect below stage 3")
        self.values["stage"] = self.stage
        self._same("gradient_accumulation_steps", "gradient_accumulation_steps")
        self._same("gradient_clipping", "gradient_clipping")

    def _precision(self) -> None:
        reading, precision = self.reading, self.precision
        if reading.of("bf16.enabled") and reading.of("fp16.enabled"):
            reading.problem("bf16.enabled", "true, and fp16.enabled too; set one of them to false")
        if precision is not None:
            self.values["compute_dtype"] = precision
        if reading.of("fp16.enabled"):
            self.values["fp16"] = self.loss_scale
        acting = self.loss_scale if precision in ("fp16", None) else {}
        for each in _LOSS_SCALE:
            if each not in acting:
                self.effective.pop(f"fp16.{each}", None)
        name = "data_types.grad_accum_dtype"
        if (dtype := reading.of(name)) is not None:
            self._own_or_fp32(name, dtype)
            acts = "fp32" if dtype == "fp32" else "param"
            self._set("gradient_accumulation_dtype", acts, name)
        name = "communication_data_type"
        if (dtype := reading.of(name)) is not None:
            self._own_or_fp32(name, dtype)
            why = "parameters' own precision is sent, sums are fp32: the same bits"
            self.effective[name] = Effective(dtype, reading.given[name], why if dtype == "fp32" else "")

    def _own_or_fp32(self, name: str, dtype: str) -> None:
        if dtype not in ("fp32", self.precision or dtype):
            self.reading.problem(
                name,
                f"{dtype} is neither fp32 nor the parameters' {self.precision}; write one of these",
            )

    def _placement(self) -> None:
        blocks = [("optimizer", _OPTIMIZER)]
        if self.stage == 3:
            blocks.append(("params", _PARAM))
        paths: list[tuple[str, ...]] = []
        for tier_key, block in blocks:
            device, own = self.reading.of(f"{block}.device", "none"), f"{block}.nvme_path"
            self._set(tier_key, _TIERS[device], f"{block}.device")
            if device == "nvme" and self.reading.of(own):
                paths.append(self.reading.of(own))
            elif device == "nvme":
                self.reading.problem(
                    own, 'missing; device "nvme" needs a directory, such as "/local_nvme"'
                )
                self.values[tier_key] = "host"  # no second message for the same mistake
            elif own in self.effective:
                del self.effective[own]
                self.reading.notes.append(f'{own}: no effect with device "{device}"')
        union = list(dict.fromkeys(path for each in paths for path in each))
        if union:
            self.values["paths"] = union
        if len(set(paths)) > 1:
            self.reading.notes.append(
                f"{_PARAM}.nvme_path and {_OPTIMIZER}.nvme_path differ: all that is on NVMe is striped "
                f"over {', '.join(union)}"
            )
        pins = [self.reading.of(f"{block}.pin_memory") for _, block in blocks]
        pins = [pin for pin in pins if pin is not None]
        if pins:
            for _, block in blocks:
                self._set("pin_memory", any(pins), f"{block}.pin_memory", "one setting for both blocks")

    def _exchange(self) -> None:
        self._same("overlap_comm", f"{_ZERO}.overlap_comm")
        self._same("contiguous_gradients", f"{_ZERO}.contiguous_gradients")
        for which in ("reduce", "allgather"):
            name = f"{_ZERO}.{which}_bucket_size"
            if (numel := self.reading.of(name)) is not None:
                self._set(f"{which}_bucket_numel", max(numel, 1), name)
        name = f"{_ZERO}.sub_group_size"
        if (numel := self.reading.of(name)) is not None:
            acts = min(max(numel, _SMALLEST_SUB_GROUP_NUMEL), _LARGEST_SUB_GROUP_NUMEL)
            if acts < _LARGEST_SUB_GROUP_NUMEL:
                self.values["sub_group_numel"] = acts
            why = "an upper bound" if acts < numel else "the least" if acts > numel else ""
            self.effective[name] = Effective(acts, self.reading.given[name], why)

    def _stage3(self) -> None:
        if self.stage < 3:
            return
        itemsize = _ITEMSIZE[self.precision] if self.precision else self.itemsize or 4
        in_bytes = f"bytes, {itemsize} an element"
        self._same("max_live_numel", f"{_ZERO}.stage3_max_live_parameters")
        self._same("max_reuse_numel", f"{_ZERO}.stage3_max_reuse_distance")
        self._same("persistence_threshold_numel", f"{_ZERO}.stage3_param_persistence_threshold")
        name = f"{_ZERO}.stage3_prefetch_bucket_size"
        if (numel := self.reading.of(name)) is not None:
            self._set("prefetch_bytes", numel * itemsize, name, in_bytes)
        name = f"{_PARAM}.max_in_cpu"
        if (numel := self.reading.of(name)) is None:
            return
        if self.values["params"] == "nvme":
            self._set("resident_memory", numel * itemsize, name, in_bytes)
        else:
            del self.effective[name]
            self.reading.notes.append(f'{name}: no effect unless {_PARAM}.device is "nvme"')

    def _io(self) -> None:
        io: dict[str, int] = {}
        if (nbytes := self.reading.of("aio.block_size")) is not None:
            io["chunk_bytes"], self._origin["io.chunk_bytes"] = nbytes, "aio.block_size"
        if (depth := self.reading.of("aio.queue_depth")) is not None:
            for which in ("read_depth", "write_depth"):
                io[which], self._origin[f"io.{which}"] = depth, "aio.queue_depth"
        if io:
            self.values["io"] = io

    def _own(self) -> None:
        """The block ``tiermem``. Without a word in it updates wait for the next forward, which any loop
        written for DeepSpeed works with."""
        self.values.setdefault("update", "deferred")
        for name, value in self.reading.of("tiermem", {}).items():
            if name not in OWN_FIELDS:
                continue  # a comment, or a mistake that is noted
            merge = name == "io" and isinstance(value, dict)
            self.values[name] = self.values["io"] | value if merge else value
            self._origin[name] = f"tiermem.{name}"
            self.effective[f"tiermem.{name}"] = Effective(value, value)

    def _same(self, tier_key: str, name: str) -> None:
        if (value := self.reading.of(name)) is not None:
            self._set(tier_key, value, name)

    def _set(self, tier_key: str, value: Any, name: str, why: str = "") -> None:
        """``name`` acts as ``tier_key``."""
        self.values[tier_key] = value
        self._origin[tier_key] = name
        if name in self.effective:
            given = self.reading.given[name]
            self.effective[name] = Effective(value, given, why if value != given else "")
