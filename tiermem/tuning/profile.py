"""A profile: what was measured of the drives of some paths, and the settings found for them.

[Note: profiles] A profile belongs to the set of drives that were tuned together, in any order, since
bandwidths of use together depend on what is used together. Its file is named by that set, so that it
is found without reading others. It is replaced as a whole (written beside it, then renamed). What
cannot be read, is no profile or has another version is passed over with a warning that names it; it is
never an error, since everything works without.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermem.errors import ConfigError, IOContext, TierIOError
from tiermem.io import BACKENDS
from tiermem.io.checks import MAX_CHUNK_BYTES, MAX_DEPTH
from tiermem.tuning.candidates import Candidate
from tiermem.tuning.identity import Identity
from tiermem.types import ALIGNMENT

logger = logging.getLogger(__name__)

VERSION = 1
_KIND = "tiermem profile"
_MAX_BYTES = 1 << 20
_LEAST_SHARE = 1e-4  # of the fastest


@dataclass(frozen=True, slots=True)
class PathBandwidth:
    """GB/s (10^9 bytes) of one path. The first two are alone, one direction at a time; ``duplex``
    are both directions at once, in all paths that are used together. None: not measured."""

    read_gb_per_s: float | None
    write_gb_per_s: float | None
    duplex_read_gb_per_s: float
    duplex_write_gb_per_s: float

    @property
    def balanced_gb_per_s(self) -> float:
        """Of as many bytes read as written at once, both counted: what an update moves."""
        return 2 * min(self.duplex_read_gb_per_s, self.duplex_write_gb_per_s)


@dataclass(frozen=True, slots=True)
class ProfiledPath:
    """``path`` is for people; ``alone_gb_per_s`` is the balanced duplex bandwidth without the others,
    ``spread`` the lowest and the highest of the runs together, both directions summed."""

    path: str
    identity: Identity
    bandwidth: PathBandwidth
    alone_gb_per_s: float
    spread: tuple[float, float]

    def fields(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "identity": self.identity.fields(),
            **dataclasses.asdict(self.bandwidth),
            "alone_gb_per_s": self.alone_gb_per_s,
            "spread_gb_per_s": list(self.spread),
        }

    @classmethod
    def of_fields(cls, fields: Any) -> ProfiledPath:
        """Raises KeyError, TypeError or ValueError for what `fields` did not make."""
        read, write = (None if fields[name] is None else _positive(fields[name]) for name in _ALONE)
        low, high = fields["spread_gb_per_s"]
        return cls(
            path=str(fields["path"]),
            identity=Identity.of_fields(fields["identity"]),
            bandwidth=PathBandwidth(read, write, *(_positive(fields[name]) for name in _DUPLEX)),
            alone_gb_per_s=_positive(fields["alone_gb_per_s"]),
            spread=(_positive(low), _positive(high)),
        )


_ALONE = ("read_gb_per_s", "write_gb_per_s")
_DUPLEX = ("duplex_read_gb_per_s", "duplex_write_gb_per_s")


@dataclass(frozen=True, slots=True)
class Profile:
    """``settings`` are for all of ``paths``. ``date`` is UTC, ISO 8601."""

    paths: tuple[ProfiledPath, ...]
    settings: Candidate
    date: str
    kernel: str

    @property
    def weights(self) -> tuple[float, ...]:
        """The paths' shares, in use together; their sum is 1."""
        return shares([each.bandwidth.balanced_gb_per_s for each in self.paths])

    @property
    def identities(self) -> tuple[Identity, ...]:
        return tuple(each.identity for each in self.paths)

    def fields(self) -> dict[str, Any]:
        """As plain values, which `of_fields` takes."""
        return {
            "kind": _KIND,
            "version": VERSION,
            "date": self.date,
            "kernel": self.kernel,
            "settings": self.settings.fields(),
            "weights": [round(weight, 6) for weight in self.weights],
            "paths": [each.fields() for each in self.paths],
        }

    @classmethod
    def of_fields(cls, fields: Any) -> Profile:
        """Raises KeyError, TypeError or ValueError (with what is wrong) for anything else."""
        if not isinstance(fields, dict) or fields.get("kind") != _KIND:
            raise ValueError("it is no profile of tiermem's")
        if fields["version"] != VERSION:
            raise ValueError(f"its version is {fields['version']}, and {VERSION} is understood")
        paths = tuple(ProfiledPath.of_fields(each) for each in fields["paths"])
        if not paths:
            raise ValueError("it has no paths")
        return cls(paths, _settings(fields["settings"]), str(fields["date"]), str(fields["kernel"]))

    def bandwidths_for(self, identities: Sequence[Identity]) -> tuple[PathBandwidth, ...] | None:
        """By path in that order; None if these are not the drives of this profile."""
        if Counter(identities) != Counter(self.identities):
            return None
        waiting = {identity: [] for identity in identities}  # type: dict[Identity, list[PathBandwidth]]
        for each in self.paths:
            waiting[each.identity].append(each.bandwidth)
        return tuple(waiting[identity].pop(0) for identity in identities)


def shares(speeds: Sequence[float]) -> tuple[float, ...]:
    """In proportion to ``speeds``, of which one at least is positive; their sum is 1. A path that did
    not move in the time gets next to nothing, since a share is above 0."""
    least = max(speeds) * _LEAST_SHARE
    total = sum(max(speed, least) for speed in speeds)
    return tuple(max(speed, least) / total for speed in speeds)


def state_directory() -> Path:
    """``$XDG_STATE_HOME/tiermem``; by that specification only an absolute path counts.

    Raises `ConfigError` for a user without a home.
    """
    given = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "tiermem"
    try:
        return Path.home() / ".local" / "state" / "tiermem"
    except RuntimeError as error:
        raise ConfigError(
            f"there is no place for profiles: {error} Remedy: set XDG_STATE_HOME or HOME, or name a "
            "file with --save"
        ) from error


def profile_file(identities: Sequence[Identity], directory: Path | None = None) -> Path:
    """Where the profile of these drives is kept."""
    text = json.dumps(sorted(json.dumps(identity.fields()) for identity in identities))
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return (directory or state_directory()) / f"profile-{name}.json"


def check_place(file: Path | None) -> None:
    """Raises what `save_profile` would, before anything was measured for it; None: the usual place,
    whose directory is made. A file of 4 KiB is made and removed."""
    place = file or state_directory() / "profile-none.json"
    if not place.name or place.is_dir():
        raise ConfigError(
            f"the profile is to be saved in {str(place)!r}, a directory; name a file in it"
        )
    with _saving(place) as beside, open(beside, "xb") as stream:
        stream.write(bytes(ALIGNMENT))


def save_profile(profile: Profile, file: Path) -> None:
    """Replaces ``file`` as a whole; makes its directory. Raises `TierIOError` naming it."""
    with _saving(file) as beside:
        with open(beside, "x", encoding="utf-8") as stream:
            json.dump(profile.fields(), stream, indent=2)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, file)


@contextlib.contextmanager
def _saving(file: Path) -> Iterator[Path]:
    """A new name beside ``file``; what has it at the end is removed."""
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield beside
        finally:
            with contextlib.suppress(OSError):
                os.unlink(beside)
    except OSError as error:
        context = IOContext("saving the profile", str(file), 0, 0)
        remedy = "name another file with --save, or use --no-save"
        raise TierIOError(error.errno or errno.EIO, context, remedy) from error


def load_profile(file: Path) -> Profile | None:
    """None where there is none that can be used, see [Note: profiles]."""
    try:
        with open(file, "rb") as stream:
            text = stream.read(_MAX_BYTES)
        return Profile.of_fields(json.loads(text))
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = error.strerror or str(error)
    except KeyError as error:
        problem = f"{error} is missing"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = str(error)
    logger.warning(
        "the profile %s is not used: %s; make a new one with tiermem tune, or delete it", file, problem
    )
    return None


def _positive(value: Any) -> float:
    number = float(value)
    if isinstance(value, (bool, str)) or not 0 < number < float("inf"):
        raise ValueError(f"{value!r} is no bandwidth")
    return number


def _settings(fields: Any) -> Candidate:
    settings = Candidate(
        str(fields["backend"]),
        _whole(fields["chunk_bytes"], MAX_CHUNK_BYTES),
        _whole(fields["read_depth"], MAX_DEPTH),
        _whole(fields["write_depth"], MAX_DEPTH),
    )
    if settings.backend not in BACKENDS or settings.chunk_bytes % ALIGNMENT:
        raise ValueError(f"{settings.fields()} are no settings that work")
    return settings


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{value!r} is not a whole number from 1 to {most}")
    return value
