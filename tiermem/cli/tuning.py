"""Runs `tiermem tune` and shows what comes of it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tiermem.cli.bar import watch
from tiermem.cli.bench_tables import place_lines
from tiermem.cli.stopping import Stopping
from tiermem.errors import TierMemError
from tiermem.tuning.candidates import Candidate
from tiermem.tuning.emit import FRAGMENTS
from tiermem.tuning.profile import check_place, load_profile, profile_file, save_profile
from tiermem.tuning.tuner import Outcome, TunePlan, Tuner
from tiermem.tuning.verdict import Gain, Verdict
from tiermem.types import size_text

_SECONDS = "{task.completed:.0f} of {task.total:.0f} s"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is to become of the result. ``emit``: a key of `FRAGMENTS`; ``file`` None: the usual one."""

    emit: str | None
    file: Path | None
    keep: bool
    as_json: bool


def tune_paths(plan: TunePlan, wishes: Wishes) -> int:
    """Measures, saves and prints; the exit code (128 + signal when it was stopped)."""
    failure: TierMemError | None = None
    kept: _Kept | None = None
    if wishes.keep:
        check_place(wishes.file)
    with Stopping("stopping and removing the files") as stopping:
        with (
            watch(Console(stderr=True), plan.budget, _SECONDS) as watcher,
            Tuner(plan, watcher, stopping.event) as tuner,
        ):
            outcome = tuner.run()
        stopped = stopping.event.is_set()
        try:
            kept = _save(outcome, wishes)
        except TierMemError as error:  # what was found is shown
            failure = error
        if wishes.as_json:
            print(json.dumps(_fields(tuner, outcome, wishes, kept, stopped=stopped)))
        else:
            _show(tuner, outcome, wishes, kept)
    if failure is not None:
        raise failure
    return stopping.code


@dataclass(frozen=True, slots=True)
class _Kept:
    """The profile's file. ``earlier``: the date of the one that stays there instead; else empty."""

    file: Path
    earlier: str = ""


def _save(outcome: Outcome, wishes: Wishes) -> _Kept | None:
    """A search that was too short to compare anything takes no earlier one's place, unless that is
    asked for by name."""
    profile = outcome.profile
    if profile is None or not wishes.keep:
        return None
    file = wishes.file or profile_file(profile.identities)
    if wishes.file is None and not outcome.verdict.is_compared:
        earlier = load_profile(file)
        if earlier is not None:
            return _Kept(file, earlier.date)
    save_profile(profile, file)
    return _Kept(file)


def _fields(
    tuner: Tuner, outcome: Outcome, wishes: Wishes, kept: _Kept | None, *, stopped: bool
) -> dict[str, Any]:
    session, profile, verdict = tuner.session, outcome.profile, outcome.verdict
    fields: dict[str, Any] = {
        "tiermem": metadata.version("tiermem"),
        "kernel": platform.release(),
        "places": [place.site.fields() | {"o_direct": place.file.direct} for place in session.places],
        "reclaimed": list(session.reclaimed),
        "budget_seconds": tuner.plan.budget,
        "seconds": round(outcome.seconds, 2),
        "run_seconds": tuner.plan.run_seconds,
        "runs": outcome.num_runs,
        "settings_tried": outcome.num_candidates,
        "written_bytes": outcome.written_bytes,
        "default": verdict.default.fields(),
        "chosen": verdict.chosen.fields(),
        "is_distinguishable": verdict.is_distinguishable,
        "rival": None if verdict.rival is None else verdict.rival.fields(),
        "gain": None if verdict.gain is None else verdict.gain.fields(),
        "together_over_alone": None if outcome.together is None else round(outcome.together, 3),
        "profile": None if profile is None else profile.fields(),
        "saved": None if kept is None or kept.earlier else str(kept.file),
        "warnings": list(session.warnings),
        "stopped": stopped,
    }
    if wishes.emit is not None:
        fields["emitted"] = None if profile is None else FRAGMENTS[wishes.emit](profile)
    return fields


def _show(tuner: Tuner, outcome: Outcome, wishes: Wishes, kept: _Kept | None) -> None:
    """With ``emit`` only that is on stdout."""
    console = Console(stderr=wishes.emit is not None)
    for place in tuner.session.places:
        for line in place_lines(place):
            console.print(Text(line), soft_wrap=True)
    for warning in tuner.session.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for line in (*_search_lines(outcome), *_profile_lines(outcome)):
        console.print(Text(line), soft_wrap=True)
    if kept is not None:
        console.print(Text(_kept_text(kept, is_found=wishes.file is None)), soft_wrap=True)
    if wishes.emit is not None and outcome.profile is not None:
        print(json.dumps(FRAGMENTS[wishes.emit](outcome.profile), indent=2))


def _kept_text(kept: _Kept, *, is_found: bool) -> str:
    text = f"saved        {kept.file}"
    if kept.earlier:
        text = f"not saved    too short to replace the profile of {kept.earlier}, {kept.file}"
    if is_found:
        text += "; tiermem.Runtime uses it for these drives, where your configuration says nothing"
    return text


def _search_lines(outcome: Outcome) -> Iterator[str]:
    verdict = outcome.verdict
    yield (
        f"search       {outcome.num_runs} runs of {outcome.num_candidates} "
        f"setting{'' if outcome.num_candidates == 1 else 's'} in "
        f"{outcome.seconds:.0f} s; {outcome.written_bytes / 1e9:.0f} GB were written"
    )
    yield f"settings     {setting_text(verdict.chosen)}"
    yield f"             {certainty(verdict)}"


def setting_text(candidate: Candidate) -> str:
    """For people."""
    return (
        f"{candidate.backend}, blocks of {size_text(candidate.chunk_bytes)}, depth "
        f"{candidate.read_depth} for reads and {candidate.write_depth} for writes"
    )


def certainty(verdict: Verdict) -> str:
    """How sure the choice is, in words."""
    gain = verdict.gain
    if gain is None or verdict.rival is None:
        return "the default: the time was too short to compare it with anything; give a longer --budget"
    if verdict.is_distinguishable:
        return (
            f"{gain.median:.2f} times the default ({setting_text(verdict.default)}), with 95% "
            f"confidence {_interval(gain)}, from {gain.pairs} paired runs"
        )
    if gain.low is None:
        return (
            f"the default: {gain.pairs} paired runs are too few to tell it from anything; give a "
            "longer --budget"
        )
    return (
        f"the default: no setting is distinguishable from it; the best other one "
        f"({setting_text(verdict.rival)}) reached {gain.median:.2f} {_interval(gain)} times its "
        f"bandwidth in {gain.pairs} paired runs"
    )


def _interval(gain: Gain) -> str:
    return "" if gain.low is None or gain.high is None else f"[{gain.low:.2f}, {gain.high:.2f}]"


def _profile_lines(outcome: Outcome) -> Iterator[str]:
    profile = outcome.profile
    if profile is None:
        yield "             stopped before its figures were measured: nothing is saved"
        return
    for each, weight in zip(profile.paths, profile.weights, strict=True):
        bandwidth, (low, high) = each.bandwidth, each.spread
        yield (
            f"{each.path}: read {bandwidth.read_gb_per_s:.2f}, write {bandwidth.write_gb_per_s:.2f} "
            f"GB/s; both at once {bandwidth.duplex_read_gb_per_s:.2f} + "
            f"{bandwidth.duplex_write_gb_per_s:.2f} (their sum {low:.2f} to {high:.2f} over the runs)"
            f"{_share_text(profile.paths, weight)}"
        )
    if outcome.together is not None:
        yield _together_text(outcome)


def _share_text(paths: Sequence[Any], weight: float) -> str:
    return f"; share {weight:.0%}" if len(paths) > 1 else ""


def _together_text(outcome: Outcome) -> str:
    text = f"together     {outcome.together:.2f} times the sum of each alone"
    if outcome.is_shared:
        text += (
            ": the paths hold each other up, as on one device or one link; their shares are those of "
            "use together"
        )
    return text
