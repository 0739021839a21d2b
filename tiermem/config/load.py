"""One entry for every kind of configuration: `load_config`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tiermem.config.deepspeed import for_runtime
from tiermem.config.text import read_json
from tiermem.config.tier import TierConfig, explain
from tiermem.config.vocabulary import is_deepspeed
from tiermem.errors import ConfigError

logger = logging.getLogger(__name__)


def load_config(
    source: TierConfig | Mapping[str, Any] | str | Path, *, silent: bool = False
) -> TierConfig:
    """A checked configuration from itself, a mapping, or the path of a JSON file.

    A mapping in DeepSpeed's vocabulary is translated (`read_deepspeed`); what is to be said about it is
    logged, unless ``silent``. Raises `ConfigError` that lists every problem.
    """
    if isinstance(source, TierConfig):
        return source
    if isinstance(source, (str, Path)):
        source = read_json(Path(source))
    if not isinstance(source, Mapping):
        raise ConfigError(f"a configuration is a mapping, a path or a TierConfig, not {source!r}")
    if is_deepspeed(source):
        tier, notes = for_runtime(source)
        for note in () if silent else notes:
            logger.warning("DeepSpeed configuration: %s", note)
        return tier
    try:
        return TierConfig.model_validate(dict(source))
    except ValidationError as error:
        problems = [explain(problem) for problem in error.errors()]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(f"{count} in the configuration:\n  " + "\n  ".join(problems)) from None
