"""How a runtime uses its paths: what the user says, else a saved profile, else a quick measurement.

[Note: path shares] Shares change where bytes lie and never what they are, so that measuring is safe.
The user's ``path_weights`` and each key of ``io`` that is given win. Otherwise a profile of these very
drives gives both. Without one, shares of several paths are measured in a second, and the
settings are those of the newest profile in which all of these paths are among others, else the
defaults.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermem.errors import ConfigError, TierMemError
from tiermem.io import Engine, QueueOptions, open_engine
from tiermem.tuning.candidates import Candidate
from tiermem.tuning.identity import Identity, identify
from tiermem.tuning.profile import (
    PathBandwidth,
    Profile,
    load_profile,
    profile_file,
    shares,
    state_directory,
)
from tiermem.tuning.quick import RUN_SECONDS, measure_quickly

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PathUse:
    """``weights`` and ``bandwidths`` by path; the ``..._from`` say for people where they are from.

    ``bandwidths`` is None where nothing was measured. ``settings.backend`` may be ``auto``.
    """

    weights: tuple[float, ...]
    weights_from: str
    bandwidths: tuple[PathBandwidth, ...] | None
    settings: Candidate
    settings_from: str

    @property
    def queue_options(self) -> QueueOptions:
        settings = self.settings
        return QueueOptions(settings.chunk_bytes, settings.read_depth, settings.write_depth)


@dataclass(frozen=True, slots=True)
class _Found:
    """``exact``: of these drives and no others; ``bandwidths`` are then in the order of the paths."""

    profile: Profile
    file: Path
    bandwidths: tuple[PathBandwidth, ...] | None


def choose_paths(
    paths: Sequence[Path],
    *,
    weights: Sequence[float] | None = None,
    io: Mapping[str, Any],
    direct: bool = True,
) -> PathUse:
    """See [Note: path shares]. ``io`` has the keys that the user gave, of `Candidate`'s.

    The paths are directories that can be used. Raises nothing for what cannot be measured: shares
    are equal then, with a warning.
    """
    found = _find(paths) if paths else None
    settings = dataclasses.replace(found.profile.settings if found else Candidate("auto"), **io)
    settings_from = _origin(found, io)
    bandwidths = found.bandwidths if found else None
    if found is not None:
        logger.info("paths are driven with %s (%s)", settings.fields(), settings_from)
    if weights is not None:
        return PathUse(tuple(weights), "path_weights", bandwidths, settings, settings_from)
    if len(paths) < 2:
        return PathUse((1.0,) * len(paths), "one path", bandwidths, settings, settings_from)
    if found is not None and bandwidths is not None:
        origin = f"the profile {found.file}"
        weights = shares([each.balanced_gb_per_s for each in bandwidths])
        return PathUse(weights, origin, bandwidths, settings, settings_from)
    weights, origin, bandwidths = _measure(paths, str(io.get("backend", "auto")), direct)
    return PathUse(weights, origin, bandwidths, settings, settings_from)


def open_chosen_engine(use: PathUse, given: Mapping[str, Any], directory: Path | None) -> Engine:
    """The engine of ``use``. A backend that only a profile names is replaced if it does not work any
    more; one that the user names is not (`ConfigError`)."""
    backend = use.settings.backend
    if "backend" in given:
        return open_engine(backend, directory)
    try:
        return open_engine(backend, directory)
    except ConfigError as error:
        if backend == "auto":
            raise
        logger.warning("%s names a backend that is of no use now: %s", use.settings_from, error)
        return open_engine("auto", directory)


def _origin(found: _Found | None, io: Mapping[str, Any]) -> str:
    if found is None:
        return "io and defaults" if io else "defaults"
    return f"io and the profile {found.file}" if io else f"the profile {found.file}"


def _measure(
    paths: Sequence[Path], backend: str, direct: bool
) -> tuple[tuple[float, ...], str, tuple[PathBandwidth, ...] | None]:
    equal = (1.0 / len(paths),) * len(paths)
    try:
        measured = measure_quickly(paths, backend=backend, direct=direct)
    except (TierMemError, OSError) as error:
        logger.warning(
            "the bandwidths of the paths cannot be measured, so that their shares are equal: %s; give "
            "path_weights, or make a profile with tiermem tune",
            error,
        )
        return equal, "equal: they could not be measured", None
    speeds = [each.balanced_gb_per_s for each in measured]
    if not max(speeds):
        logger.warning("the paths moved nothing while they were measured: their shares are equal")
        return equal, "equal: nothing was moved in the time", None
    weights = shares(speeds)
    shown = ", ".join(
        f"{path} {weight:.0%} (read {each.duplex_read_gb_per_s:.2f}, write "
        f"{each.duplex_write_gb_per_s:.2f} GB/s)"
        for path, weight, each in zip(paths, weights, measured, strict=True)
    )
    logger.info("path shares from runs of %g s: %s", RUN_SECONDS, shown)
    return weights, f"measured in runs of {RUN_SECONDS:g} s", measured


def _find(paths: Sequence[Path]) -> _Found | None:
    try:
        identities = [identify(path) for path in paths]
        file = profile_file(identities)
    except (OSError, ConfigError) as error:
        logger.info("no profile is looked for: %s", error)
        return None
    profile = load_profile(file)
    if profile is not None:
        bandwidths = profile.bandwidths_for(identities)
        if bandwidths is not None:
            return _Found(profile, file, bandwidths)
    return _newest_with(identities, tried=file)


def _newest_with(identities: Sequence[Identity], tried: Path) -> _Found | None:
    wanted = Counter(identities)
    best: _Found | None = None
    for file in sorted(state_directory().glob("profile-*.json")):
        profile = None if file == tried else load_profile(file)
        if profile is None or wanted - Counter(profile.identities):
            continue
        if best is None or profile.date > best.profile.date:
            best = _Found(profile, file, None)
    return best
