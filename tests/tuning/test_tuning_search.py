"""On simulated drives with noise and drift the search comes close to the best setting there is, and
claims no gain where there is none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from tiermem.io import QueueOptions
from tiermem.tuning.candidates import CHUNKS, DEPTHS, MAX_IN_FLIGHT_BYTES, Candidate, Space
from tiermem.tuning.search import Search
from tiermem.tuning.verdict import Verdict

BACKENDS = ("io_uring", "libaio", "native_threads")
DEFAULT = Candidate("io_uring")
Drive = Callable[[Candidate], float]


def saturating(chunk_knee: int, read_knee: float, write_knee: float, favourite: str) -> Drive:
    """A drive that wants chunks of a size and depths of a kind; more than that costs a little."""

    def speed(c: Candidate) -> float:
        chunk = c.chunk_bytes / (c.chunk_bytes + chunk_knee) / (1 + c.chunk_bytes / (64 << 20))
        reads = c.read_depth / (c.read_depth + read_knee)
        writes = c.write_depth / (c.write_depth + write_knee) / (1 + c.write_depth / 512)
        return 8.0 * chunk * min(reads, writes) * (1.0 if c.backend == favourite else 0.93)

    return speed


def run(drive: Drive, runs: int, noise: float, seed: int, space: Space | None = None) -> Search:
    """A search of ``runs`` runs; each round has its own drift that all its runs share."""
    rng = random.Random(seed)
    search = Search(space or Space(DEFAULT, BACKENDS))
    left = runs
    while names := search.next_round(left):
        assert len(names) <= left
        assert len(set(names)) == len(names)
        assert DEFAULT in names
        drift = rng.uniform(0.6, 1.0)
        search.record({c: drive(c) * drift * rng.lognormvariate(0, noise) for c in names})
        left -= len(names)
    return search


def best_of(drive: Drive) -> float:
    return max(
        drive(Candidate(backend, chunk, reads, writes))
        for backend, chunk, reads, writes in itertools.product(BACKENDS, CHUNKS, DEPTHS, DEPTHS)
        if max(reads, writes) * chunk <= MAX_IN_FLIGHT_BYTES
    )


def test_close_to_the_best() -> None:
    """The search measures under noise, so this holds for most searches, not for each: in 98 of 100
    what it chooses reaches 0.9 of the best there is, in all 0.85, and never less than the default."""
    rng, reached = random.Random(5), []
    for _ in range(400):
        drive = saturating(
            rng.choice([16 << 10, 128 << 10, 1 << 20]),
            rng.choice([0.2, 2.0, 8.0]),
            rng.choice([0.2, 2.0, 8.0]),
            rng.choice(BACKENDS),
        )
        chosen = run(drive, 140, 0.04, rng.randrange(1 << 30)).verdict().chosen
        reached.append(drive(chosen) / best_of(drive))
        assert drive(chosen) >= 0.97 * drive(DEFAULT)
    assert sum(each < 0.9 for each in reached) <= 0.02 * len(reached)
    assert min(reached) >= 0.85


def test_without_noise_it_is_within_three_percent() -> None:
    for knee, reads, writes in itertools.product((16 << 10, 1 << 20), (0.2, 8.0), (0.2, 8.0)):
        drive = saturating(knee, reads, writes, "libaio")
        verdict = run(drive, 200, 0.0, 1).verdict()
        assert drive(verdict.chosen) >= 0.97 * best_of(drive), (knee, reads, writes, verdict.chosen)


def test_where_all_are_equal_the_default_stays() -> None:
    """With 95% confidence per search, 60 searches may be wrong a few times."""
    verdicts = [run(lambda _: 4.0, 120, 0.05, seed).verdict() for seed in range(60)]
    wrong = [verdict for verdict in verdicts if verdict.is_distinguishable]
    assert len(wrong) <= 6
    assert all(verdict.gain is not None for verdict in verdicts)


def test_a_setting_that_is_clearly_better_is_said_to_be() -> None:
    def drive(c: Candidate) -> float:
        return 3.0 if c.chunk_bytes <= 1 << 20 else 2.0

    for seed in range(10):
        verdict = run(drive, 120, 0.05, seed).verdict()
        assert verdict.chosen.chunk_bytes <= 1 << 20
        assert verdict.gain is not None
        assert verdict.gain.low is not None
        assert 1.0 < verdict.gain.low <= verdict.gain.median
        assert 1.3 < verdict.gain.median < 1.7


def test_among_equals_the_one_with_least_in_flight() -> None:
    """Everything with chunks below the default's is 1.5 times as fast, whatever the depth."""

    def drive(c: Candidate) -> float:
        return 3.0 if c.chunk_bytes < DEFAULT.chunk_bytes else 2.0

    small = run(drive, 400, 0.005, 3).verdict().chosen
    assert small.size < Candidate("io_uring", 1 << 20, 8, 8).size


@pytest.mark.parametrize("runs", [0, 1, 2, 5, 9, 12, 20, 40, 75])
def test_any_budget_ends_and_judges(runs: int) -> None:
    search = run(saturating(1 << 20, 8, 8, "libaio"), runs, 0.03, 0)
    verdict = search.verdict()
    assert verdict.rounds == len(search.final)
    if verdict.is_distinguishable:
        assert verdict.gain is not None
        assert verdict.gain.pairs >= 6


def test_only_what_fits_is_measured() -> None:
    seen: set[Candidate] = set()

    def drive(c: Candidate) -> float:
        seen.add(c)
        return 1.0 + c.read_depth / 100

    space = Space(DEFAULT, BACKENDS, fits=lambda c: c.read_depth * c.chunk_bytes <= 4 << 20)
    run(drive, 150, 0.02, 0, space)
    assert all(c == DEFAULT or c.read_depth * c.chunk_bytes <= 4 << 20 for c in seen)
    assert len(seen) > 5


def test_a_search_that_was_stopped_judges_what_it_has() -> None:
    search = Search(Space(DEFAULT, BACKENDS))
    search.record(dict.fromkeys(search.next_round(100), 1.0))
    verdict = search.verdict()
    assert verdict == Verdict(DEFAULT, DEFAULT, None, None, 0)


def test_the_default_is_the_engines() -> None:
    options = QueueOptions()
    assert (DEFAULT.chunk_bytes, DEFAULT.read_depth) == (options.chunk_bytes, options.read_depth)
    assert DEFAULT.write_depth == options.write_depth
