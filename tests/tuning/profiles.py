"""Profiles as tune would make them, for drives that exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiermem.tuning.candidates import Candidate
from tiermem.tuning.identity import Identity, identify
from tiermem.tuning.profile import PathBandwidth, Profile, ProfiledPath, profile_file, save_profile

SETTINGS = Candidate("libaio", 1 << 20, 8, 4)


def profile_of(
    identities: Sequence[Identity],
    speeds: Sequence[float],
    settings: Candidate = SETTINGS,
    date: str = "2026-01-01T00:00:00+00:00",
) -> Profile:
    paths = [
        ProfiledPath(
            path=f"/drive{at}",
            identity=identity,
            bandwidth=PathBandwidth(2 * speed, 3 * speed, speed, speed),
            alone_gb_per_s=2.5 * speed,
            spread=(1.9 * speed, 2.1 * speed),
        )
        for at, (identity, speed) in enumerate(zip(identities, speeds, strict=True))
    ]
    return Profile(tuple(paths), settings, date, "6.1")


def save_for(paths: Sequence[Path], speeds: Sequence[float], settings: Candidate = SETTINGS) -> Path:
    """Saves a profile of the drives of ``paths`` where it will be found."""
    identities = [identify(path) for path in paths]
    file = profile_file(identities)
    save_profile(profile_of(identities, speeds, settings), file)
    return file
