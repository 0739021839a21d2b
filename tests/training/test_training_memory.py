"""The memory of the process stays within the budgets and a constant, for a model of many times that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# hidden 384: 1.8 M parameters a block.
SCRIPT = textwrap.dedent(
    """
    import json, sys
    import torch, tiermem
    from training_rig import batches, tier_config
    from tiermem.models.gpt import GPT, GPTConfig, make_initializer

    def status(key):
        for line in open("/proc/self/status"):
            if line.startswith(key):
                return int(line.split()[1]) << 10

    torch.set_num_threads(1)
    layers, update, host, paths = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    config = tier_config(
        params="nvme", optimizer="nvme", paths=paths, host_memory=host, update=update,
        persistence_threshold_numel=2000,
    )
    model_config = GPTConfig(layers, 384, 6, context=64)
    small = GPT(GPTConfig(1, 384, 6, context=64)).to(torch.bfloat16)
    batch = batches(1, shape=(1, 64))[0]
    small(*batch).backward()  # what torch itself takes
    del small
    tiermem.Runtime, tiermem.shard, tiermem.optim.AdamW  # what importing takes
    baseline = status("VmHWM")
    with tiermem.Runtime(config) as runtime:
        with torch.device("meta"):
            model = GPT(model_config)
        init = make_initializer(0)
        model = tiermem.shard(model, runtime, init=init)
        optimizer = tiermem.optim.AdamW(model.parameters())
        for batch in batches(4, shape=(1, 64)):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime.drain()
        stats = runtime.stats()
        print(json.dumps({
            "baseline": baseline, "peak": status("VmHWM"), "device": stats.device.budget,
            "host": stats.host.budget, "states": 12 * stats.num_parameters,
        }))
    """
)


def measure(
    layers: int, update: str, host: int, paths: list[str], env: dict[str, str]
) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(layers), update, str(host), *paths],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout.splitlines()[-1]))


def allowance(layers: int) -> int:
    """Bytes beside the budgets. Activations of one sequence of 64: per block about 34 tensors of
    64 x 384 in bf16 and 6 attention matrices of 64 x 64, saved for backward; the logits; the largest
    block's parameters twice in fp32 (drawn and copied at initialisation) and its gradients in bf16 as
    autograd makes them; 48 MiB for libraries' buffers, threads' stacks and what the allocator keeps."""
    activations = layers * (34 * 64 * 384 * 2 + 6 * 64 * 64 * 4) + 64 * 256 * 12
    block = 12 * 384 * 384 + 13 * 384
    return activations + block * (2 * 4 + 2) + (48 << 20)


@pytest.mark.parametrize("update", ["deferred", pytest.param("backward", marks=pytest.mark.slow)])
def test_peak_memory_is_budgets_and_a_constant(
    update: str, tmp_path: Path, python_env: dict[str, str]
) -> None:
    tmp_path.joinpath("drive").mkdir()
    layers, host = 12, 48 << 20
    got = measure(layers, update, host, [str(tmp_path / "drive")], python_env)
    assert got["states"] > 4 * host
    assert got["host"] <= host
    grown = got["peak"] - got["baseline"]
    assert grown <= host + got["device"] + allowance(layers), got


@pytest.mark.slow
def test_twice_the_model_takes_the_same_memory_but_for_activations(
    tmp_path: Path, python_env: dict[str, str]
) -> None:
    tmp_path.joinpath("drive").mkdir()
    paths = [str(tmp_path / "drive")]
    small = measure(12, "deferred", 64 << 20, paths, python_env)
    large = measure(24, "deferred", 64 << 20, paths, python_env)
    more = (large["peak"] - large["baseline"]) - (small["peak"] - small["baseline"])
    activations = 12 * (34 * 64 * 384 * 2 + 6 * 64 * 64 * 4)
    persistent = 12 * 13 * 384 * 12
    assert more <= activations + persistent + (16 << 20), (small, large)


def test_the_environment_has_proc() -> None:
    assert os.path.exists("/proc/self/status")
