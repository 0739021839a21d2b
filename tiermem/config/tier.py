"""`TierConfig`: everything a user can set, checked at once.

Sizes take numbers of bytes or strings such as ``"256MiB"``. Unknown keys are refused with the
nearest valid one; all problems are reported in one message.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic import Field as Default

Placement = Literal["device", "host", "nvme"]
Update = Literal["deferred", "backward"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``true`` would be taken for the number 1."""
        assert info.field_name is not None
        inner = value if isinstance(value, (list, tuple)) else (value,)
        wants_boolean = cls.model_fields[info.field_name].annotation is bool
        if not wants_boolean and any(isinstance(each, bool) for each in inner):
            raise ValueError("must not be a boolean (true would count as 1); give a number or a name")
        return value


class IOConfig(_Strict):
    """How each path is driven. What is not given here comes from a saved profile of these drives
    (`tiermem tune`), if there is one."""

    backend: Literal["auto", "libaio", "io_uring", "native_threads", "threads"] = "auto"
    direct: bool = Default(True, description="O_DIRECT; falls back to buffered, said once")
    chunk_bytes: ByteSize = Default(ByteSize(2 << 20), ge=4096, le=1 << 30, multiple_of=4096)
    read_depth: int = Default(16, ge=1, le=1024)
    write_depth: int = Default(16, ge=1, le=1024)

    @property
    def given(self) -> dict[str, Any]:
        """What the user set of what a profile could set."""
        values: dict[str, Any] = {
            "backend": self.backend,
            "chunk_bytes": int(self.chunk_bytes),
            "read_depth": self.read_depth,
            "write_depth": self.write_depth,
        }
        return {key: value for key, value in values.items() if key in self.model_fields_set}


class LossScaleConfig(_Strict):
    """How losses are scaled for fp16; names and defaults are those of DeepSpeed's ``fp16`` block."""

    loss_scale: float = Default(0.0, ge=0, allow_inf_nan=False, description="fixed; 0: dynamic")
    initial_scale_power: int = Default(16, ge=0, le=32, description="dynamic: starts at 2 to this")
    loss_scale_window: int = Default(
        1000, ge=1, description="steps without overflow after which the scale is doubled"
    )
    hysteresis: int = Default(
        2, ge=1, description="the how-manieth overflow halves the scale, and so does each after it"
    )
    min_loss_scale: float = Default(1.0, gt=0, allow_inf_nan=False)
    max_skipped_steps: int = Default(
        20, ge=1, description="overflows in a row at a scale that cannot be lowered before an error"
    )

    @model_validator(mode="after")
    def _starts_above_the_minimum(self) -> LossScaleConfig:
        if self.loss_scale == 0 and 2.0**self.initial_scale_power < self.min_loss_scale:
            raise ValueError(
                f"initial_scale_power {self.initial_scale_power} starts at "
                f"{2**self.initial_scale_power}, below min_loss_scale {self.min_loss_scale:g}; lower "
                f"that one, or start higher"
            )
        return self


class TierConfig(_Strict):
    """The configuration of one `Runtime`."""

    stage: Literal[0, 1, 2, 3] = Default(
        3, description="what is sharded over ranks: nothing, states, also gradients, also parameters"
    )
    params: Placement = Default(
        "host", description="where sharded parameters live; stages 0 to 2 keep them on the device"
    )
    optimizer: Placement = Default("host", description="where optimizer states live")
    paths: tuple[Path, ...] = Default((), description="existing directories, one per drive")
    path_weights: tuple[float, ...] | None = Default(
        None,
        description="share of each path; default: by bandwidth, from a saved profile or measured",
    )
    compute_dtype: Literal["bf16", "fp16", "fp32"] | None = Default(
        None, description="cast parameters at sharding; default: keep each one's own"
    )
    master: Literal["split", "fp32"] = Default(
        "split",
        description="how bf16 parameters keep their fp32 masters: as 16-bit remainders, or whole; "
        "fp16 parameters keep them whole",
    )
    fp16: LossScaleConfig | None = Default(
        None,
        description="loss scaling; default: with its defaults where parameters are fp16, else none",
    )
    device: str = Default("auto", description="'cpu', 'cuda', or 'auto': the accelerator if any")
    host_memory: ByteSize | None = Default(
        None, gt=0, description="budget; default: what the machine and cgroup leave, per local rank"
    )
    device_memory: ByteSize | None = Default(None, gt=0, description="budget for gathered parameters")
    resident_memory: ByteSize | None = Default(
        None, ge=0, description="host memory that keeps parts of NVMe records; default: all there is"
    )
    update: Update | None = Default(
        None, description="default: 'backward' if one micro-step and no clipping are declared"
    )
    gradient_accumulation_steps: int | None = Default(None, ge=1)
    gradient_accumulation_dtype: Literal["fp32", "param"] = Default(
        "fp32",
        description="in which gradients of several micro-steps are added up; 'param': the parameters' "
        "own precision, rounded after each",
    )
    gradient_clipping: float | None = Default(None, ge=0, description="declared; 0 means none")
    prefetch_bytes: ByteSize | None = Default(
        None, ge=0, description="parameters fetched ahead; 0 is off; default: as the budget allows"
    )
    sub_group_numel: int | None = Default(None, ge=4096, description="elements per update slice")
    persistence_threshold_numel: int = Default(
        100_000, ge=0, description="parameters with fewer elements are never partitioned"
    )
    stripe_bytes: ByteSize = Default(ByteSize(1 << 20), ge=4096, multiple_of=4096)
    poison_released: bool = Default(
        False, description="debugging: fill released gather buffers with NaN"
    )
    overlap_comm: bool = Default(
        True, description="ranks exchange gradients and parameters while they compute"
    )
    contiguous_gradients: bool = Default(
        True,
        description="over several ranks: copy each gradient into its group's buffer when it is made, "
        "or (false) all of a group when its last one is",
    )
    reduce_bucket_numel: int | None = Default(
        None,
        ge=1,
        description="gradients reduced over ranks at a time, in units of 4096 bytes of each rank; "
        "default: a whole group's",
    )
    allgather_bucket_numel: int | None = Default(
        None,
        ge=1,
        description="parameters exchanged in one message, in units of 4096 bytes of each rank; "
        "default: a whole group's",
    )
    max_live_numel: int | None = Default(
        None, ge=0, description="parameters gathered from other ranks at a time; default: the budget's"
    )
    max_reuse_numel: int | None = Default(
        None,
        ge=0,
        description="keep gathered parameters if they are used again within so many elements; "
        "default: while there is room",
    )
    num_threads: int | None = Default(
        None,
        ge=1,
        le=4096,
        description="threads of torch's operations and of updates, in each process; default: "
        "OMP_NUM_THREADS if you set it, else the cores divided by the local ranks",
    )
    pin_memory: bool = Default(
        True, description="lock host memory, and register it with io_uring, where the limit allows"
    )
    malloc_mmap_threshold: ByteSize | None = Default(
        None,
        ge=128 << 10,
        le=32 << 20,
        description="freed blocks of this size and more are returned to the system at once, in the "
        "whole process; default: leave the C library as it is",
    )
    io: IOConfig = IOConfig()

    @field_validator("compute_dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: Any) -> Any:
        """torch's own names are understood, without importing torch."""
        names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
        return names.get(str(value), value)

    @model_validator(mode="before")
    @classmethod
    def _whole_on_device(cls, values: Any) -> Any:
        """Stages below 3 keep parameters on the device, if nothing else is said."""
        if isinstance(values, Mapping) and "params" not in values and values.get("stage") in (0, 1, 2):
            return {**values, "params": "device"}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> TierConfig:
        if self.stage < 3 and self.params != "device":
            raise ValueError(
                f"stage {self.stage} keeps parameters whole on the device, params is {self.params!r}; "
                f"leave params out, or use stage 3, which shards them"
            )
        nvme = [key for key in ("params", "optimizer") if getattr(self, key) == "nvme"]
        if nvme and not self.paths:
            raise ValueError(f"{' and '.join(nvme)}: 'nvme' needs at least one directory in 'paths'")
        if self.path_weights is not None:
            if len(self.path_weights) != len(self.paths):
                raise ValueError(
                    f"path_weights has {len(self.path_weights)} entries for {len(self.paths)} paths"
                )
            if any(not 0 < weight < math.inf for weight in self.path_weights):
                raise ValueError(
                    f"path_weights must all be above 0 and finite, not {list(self.path_weights)}"
                )
        if self.update == "backward" and (self.gradient_clipping or 0) > 0:
            raise ValueError("update: 'backward' cannot clip by the global norm; use 'deferred'")
        if self.update == "backward" and (self.gradient_accumulation_steps or 1) > 1:
            raise ValueError("update: 'backward' declares one micro-step; use 'deferred' to accumulate")
        if self.update == "backward" and self.scales_loss:
            raise ValueError(
                "update: 'backward' cannot scale losses for fp16, where an overflow anywhere skips the "
                "whole step; use 'deferred'"
            )
        return self

    @property
    def effective_update(self) -> Update:
        """The update mode in force (see ``update``)."""
        if self.update is not None:
            return self.update
        declared = self.gradient_accumulation_steps == 1 and self.gradient_clipping == 0
        return "backward" if declared and not self.scales_loss else "deferred"

    @property
    def scales_loss(self) -> bool:
        """Whether losses are scaled whatever the parameters' own precision is."""
        return self.fp16 is not None or self.compute_dtype == "fp16"

    @property
    def may_widen(self) -> bool:
        """Whether a further micro-step may turn 16-bit gradients into fp32."""
        once = self.effective_update == "backward" or self.gradient_accumulation_steps == 1
        return not once and self.gradient_accumulation_dtype == "fp32"

    @property
    def starts_wide(self) -> bool:
        """Whether gradients are fp32 from the first micro-step on, since more are declared."""
        return (
            self.gradient_accumulation_steps or 1
        ) > 1 and self.gradient_accumulation_dtype == "fp32"

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.params, self.optimizer)


def explain(problem: Any, names: Mapping[str, str] | None = None) -> str:
    """One of pydantic's problems with a `TierConfig`, in one line. ``names``: what to call the keys."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location) or "(whole)"
    if problem["type"] == "extra_forbidden":
        model = _NESTED.get(".".join(location[:-1]), TierConfig)
        near = difflib.get_close_matches(location[-1].lower(), model.model_fields, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(model.model_fields)}"
        return f"{key}: unknown key{hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"].startswith("byte_size"):
        message = (
            "must be a size: a whole number of bytes that is not negative, or for example '256MiB'"
        )
    elif problem["type"] == "tuple_type":
        message = f"must be a list, for example [{problem['input']!r}]"
    if problem["type"] == "value_error" and (not location or key in _NESTED):
        return str(message)
    return f"{(names or {}).get(key, key)}: {message}; got {problem['input']!r}"


_NESTED: dict[str, type[BaseModel]] = {"io": IOConfig, "fp16": LossScaleConfig}

PLACEMENTS: tuple[str, ...] = get_args(Placement)
