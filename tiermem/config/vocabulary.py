"""In whose vocabulary a mapping is: tiermem's own or DeepSpeed's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from tiermem.config.deepspeed_keys import TABLE
from tiermem.config.tier import LossScaleConfig, TierConfig
from tiermem.errors import ConfigError


def is_deepspeed(source: Mapping[str, Any]) -> bool:
    """Whether a mapping is in DeepSpeed's vocabulary: it has a key that only DeepSpeed knows, or, if it
    has none of tiermem's, one that is nearly so."""
    return bool(_deepspeed_only(source))


def refuse_mixture(source: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if there are keys that only tiermem knows beside DeepSpeed's."""
    theirs = _deepspeed_only(source)
    alike = {key.last for key in TABLE.children("zero_optimization")}
    # Keys that both know by one name (overlap_comm) are DeepSpeed's, in the wrong block.
    own = TierConfig.model_fields.keys() - TABLE.top_level - alike
    ours = [key for key in source if key in own]
    if ours and theirs:
        raise ConfigError(
            f"a configuration has tiermem's keys ({', '.join(ours)}) or DeepSpeed's "
            f"({', '.join(theirs)}), not both; in DeepSpeed's file tiermem's own keys are in the block "
            f'"tiermem": {{"tiermem": {{"{ours[0]}": ...}}}}'
        )


def _deepspeed_only(source: Mapping[str, Any]) -> list[str]:
    own = TierConfig.model_fields.keys()
    names = TABLE.top_level - own
    found = [key for key in source if key in names]
    fp16, optimizer = source.get("fp16"), source.get("optimizer")
    their_fp16 = {key.last for key in TABLE.children("fp16")} - LossScaleConfig.model_fields.keys()
    if isinstance(fp16, Mapping) and their_fp16 & fp16.keys():
        found.append("fp16")
    if isinstance(optimizer, Mapping):  # tiermem's own is the name of a tier
        found.append("optimizer")
    if not found and not own & source.keys():
        found = [str(key) for key in source if _is_near(str(key), names)]
    return found


def _is_near(key: str, names: frozenset[str]) -> bool:
    return bool(difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.85))
