"""`tiermem bench` end to end: figures, latencies, several paths, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_rig import SMALL, bench, bench_json, command, left_in, shown_on_a_terminal

import tiermem.io as tio

Environment = dict[str, str]


@pytest.mark.parametrize("backend", tio.BACKENDS)
def test_every_mode_on_every_backend(
    tmp_path: Path, plain_environment: Environment, backend: str
) -> None:
    if tio.probe_backends(tmp_path)[backend] != "works":
        pytest.skip(f"{backend} does not work here")
    found = bench_json(plain_environment, tmp_path, *SMALL, "--backend", backend)
    assert (found["backend"], found["stopped"]) == (backend, False)
    assert [result["mode"] for result in found["results"]] == ["read", "write", "duplex"]
    for result, blocks in zip(found["results"], (128, 128, 64), strict=True):
        ops = {"read": ["read"], "write": ["write"], "duplex": ["read", "write"]}[result["mode"]]
        assert [op for op in ("read", "write") if op in result] == ops
        assert result["runs"] == 2
        for op in ops:
            flow = result[op]
            assert flow["latency"]["blocks"] == 2 * blocks
            assert flow["latency"]["p50_us"] > 0
            assert flow["latency"]["p999_us"] is None
            speed = flow["gb_per_s"]
            assert 0 < speed["lowest"] <= speed["median"] <= speed["highest"]
            assert speed["lowest"] <= speed["mean"] <= speed["highest"]
            assert flow["iops"]["median"] == pytest.approx(speed["median"] * 1e9 / (64 << 10), rel=1e-3)
    assert left_in(tmp_path) == []


def test_timed_runs_over_a_grid_with_threads(tmp_path: Path, plain_environment: Environment) -> None:
    grid = ("--block-size", "16KiB,64k", "--depth", "1,4", "--threads", "2", "--mode", "duplex")
    found = bench_json(
        plain_environment, tmp_path, *grid, "--size", "8MiB", "--runtime", "0.05", "--loops", "3"
    )
    points = [(result["block_bytes"], result["depth"]) for result in found["results"]]
    assert points == [(16 << 10, 1), (16 << 10, 4), (64 << 10, 1), (64 << 10, 4)]
    assert all(result["threads"] == 2 and result["runs"] == 3 for result in found["results"])
    for result in found["results"]:
        latency = result["read"]["latency"]
        assert latency["p50_us"] <= latency["p99_us"] or latency["p99_us"] is None


def test_several_paths_and_their_aggregate(tmp_path: Path, plain_environment: Environment) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.mkdir()
    arguments = (*paths, *SMALL, "--mode", "read", "--runtime", "0.1")
    found = bench_json(plain_environment, *arguments)
    result = found["results"][0]
    assert [part["path"] for part in result["paths"]] == [str(path) for path in paths]
    parts = [part["read"] for part in result["paths"]]
    assert result["read"]["gb_per_s"]["mean"] == pytest.approx(
        sum(part["gb_per_s"]["mean"] for part in parts), rel=1e-3
    )
    blocks = result["read"]["latency"]["blocks"]
    assert blocks == sum(part["latency"]["blocks"] for part in parts)
    table = bench(plain_environment, *arguments).stdout
    assert " all " in table
    assert all(str(path) in table for path in paths)
    assert left_in(*paths) == []


def test_the_head_and_the_table(tmp_path: Path, plain_environment: Environment) -> None:
    shown = bench(plain_environment, tmp_path, *SMALL).stdout
    for word in ("device", "PCIe link", "filesystem", "free", "O_DIRECT", "backend", "a write and a"):
        assert word in shown, shown
    for word in ("GB/s", "mean ± stdev", "IOPS", "p50", "p99", "p99.9", "duplex read", "duplex write"):
        assert word in shown, shown


def test_the_table_is_not_cut_on_a_narrow_terminal(
    tmp_path: Path, plain_environment: Environment
) -> None:
    shown = bench(plain_environment | {"COLUMNS": "40"}, tmp_path, *SMALL, "--mode", "read").stdout
    assert "…" not in shown
    assert "64 KiB" in shown


def test_what_is_few_is_explained(tmp_path: Path, plain_environment: Environment) -> None:
    arguments = (tmp_path, "--size", "8MiB", "--loops", "1", "--runtime", "0", "--mode", "read")
    some = bench(plain_environment, *arguments, "--block-size", "64KiB").stdout
    assert "few: too few blocks" in some
    many = bench(plain_environment, *arguments, "--block-size", "4KiB").stdout
    assert "few:" not in many


def test_buffered(tmp_path: Path, plain_environment: Environment) -> None:
    found = bench_json(plain_environment, tmp_path, *SMALL, "--buffered")
    assert [place["o_direct"] for place in found["places"]] == [False]
    assert any("page cache" in warning for warning in found["warnings"])
    assert any("smaller than memory" in warning for warning in found["warnings"])


def test_small_pages_against_huge_ones(tmp_path: Path, plain_environment: Environment) -> None:
    arguments = (tmp_path, *SMALL, "--mode", "write", "--pages", "both")
    found = bench_json(plain_environment, *arguments)
    assert [result["pages"] for result in found["results"]] == ["huge", "small"]
    assert "times the bandwidth on huge pages" in bench(plain_environment, *arguments).stdout


def test_a_picture(tmp_path: Path, plain_environment: Environment) -> None:
    pytest.importorskip("matplotlib")
    drive = tmp_path / "drive"
    drive.mkdir()
    picture = tmp_path / "speed.png"
    arguments = (*SMALL, "--depth", "1,4", "--block-size", "16KiB,64KiB", "--pages", "both")
    bench(plain_environment, drive, *arguments, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_bar_on_a_terminal(tmp_path: Path, plain_environment: Environment) -> None:
    arguments = (tmp_path, *SMALL, "--runtime", "0.3", "--mode", "read")
    shown = shown_on_a_terminal(command(*arguments), plain_environment)
    assert b"read 64 KiB depth 4" in shown
    assert "━".encode() in shown
    assert b"of 2" in shown
