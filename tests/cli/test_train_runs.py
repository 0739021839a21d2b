"""`tiermem train` end to end on a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = (
    "--layers",
    "4",
    "--hidden",
    "384",
    "--context",
    "64",
    "--sequence-length",
    "64",
    "--batch-size",
    "2",
)


def _command(directory: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tiermem.cli", "train", *TINY),
        *("--path", str(directory), "--host-memory", "16MiB", "--resident-memory", "0"),
        *arguments,
    ]


def _train(
    directory: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        _command(directory, *arguments), capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_check_agrees_and_nothing_is_left(
    tmp_path: Path, plain_environment: dict[str, str], update: str, precision: str
) -> None:
    done = _train(
        tmp_path,
        plain_environment,
        *("--steps", "6", "--check", "--json", "--update", update, "--precision", precision),
    )
    result = json.loads(done.stdout)
    assert len(result["losses"]) == 6
    if precision == "bf16":
        assert result["losses_bit_equal"], (result["losses"], result["reference_losses"])
    else:  # torch's own tails are within 1 ulp only
        assert result["losses_largest_difference"] < 1e-5
    assert result["host_peak_bytes"] <= result["host_budget_bytes"] <= 16 << 20
    assert list(tmp_path.iterdir()) == []


def test_plain_lines_and_table(tmp_path: Path, plain_environment: dict[str, str]) -> None:
    done = _train(tmp_path, plain_environment, "--steps", "4", "--check", "--clip", "1")
    for word in ("step 1/4", "tokens/s", "GB/s", "stalled", "peak RSS", "per parameter and step"):
        assert word in done.stdout, done.stdout
    assert "losses" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_step(
    tmp_path: Path, plain_environment: dict[str, str], number: signal.Signals
) -> None:
    process = subprocess.Popen(
        _command(tmp_path, "--steps", "1000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                break
        assert list(tmp_path.iterdir()), "no states on the drive while it runs"
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error
    assert "stopped" in out
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_during_start_up(tmp_path: Path, plain_environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        _command(tmp_path, "--steps", "1000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment,
    )
    time.sleep(1.0)  # wherever that is: imports or the first values
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_budget_too_small_says_what_would_do(
    tmp_path: Path, plain_environment: dict[str, str]
) -> None:
    done = subprocess.run(
        _command(tmp_path, "--host-memory", "64KiB"),
        capture_output=True,
        text=True,
        env=plain_environment,
        timeout=120,
    )
    assert done.returncode == 1
    assert "host_memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_deepspeed_configuration_is_taken(tmp_path: Path, plain_environment: dict[str, str]) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    offload = {"device": "nvme", "nvme_path": str(drive)}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    config = tmp_path / "ds.json"
    config.write_text(
        f"// of old\n{json.dumps({'zero_optimization': zero, 'fp16': {'enabled': False}})}"
    )
    command = [sys.executable, "-m", "tiermem.cli", "train", *TINY, "--steps", "1", "--json"]
    done = subprocess.run(
        [*command, "--config", str(config), "--host-memory", "32MiB"],
        capture_output=True,
        text=True,
        env=plain_environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert f"states on {drive}" in done.stderr
    assert json.loads(done.stdout)["compute_dtype"] == "fp32"  # bf16 without the file
