"""A program for DeepSpeed with its import changed, under torchrun and alone."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_rig import config, loss_of, make_net

PROGRAM = Path(__file__).with_name("torchrun_program.py")


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config(zero_optimization={"stage": 2})))
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, str(PROGRAM), "--deepspeed", f"--deepspeed_config={path}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(3):
        grads = []
        for rank in range(2):
            grads.append(torch.autograd.grad(loss_of(model, 10 * step + rank), [*model.parameters()]))
        for param, a, b in zip(model.parameters(), *grads, strict=True):
            param.grad = (a + b) * 0.5
        optimizer.step()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().numpy().tobytes())
    assert lines == [f"rank {rank} of 2 {digest.hexdigest()}" for rank in range(2)]
