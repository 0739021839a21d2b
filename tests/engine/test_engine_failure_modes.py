"""Common failures of ZeRO trainings: each is told, with the remedy."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine_rig import config, engine_of, make_net
from link_rig import torchrun_on_slow_link
from ranks import run_ranks
from torch import nn

import tiermem
from tiermem.engine.advice import FIRST_STEP, NUM_STEPS
from tiermem.errors import BudgetError


def train(rows: int, stage: int) -> list[str]:
    """The advice that one rank heard."""
    torch.set_num_threads(1)
    texts: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tiermem.engine.advice").addHandler(heard)
    settings = config(
        train_micro_batch_size_per_gpu=rows,
        zero_optimization={"stage": stage},
        optimizer={"type": "SGD", "params": {"lr": 1e-3}},
    )
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    with engine_of(settings, model) as engine:
        for _ in range(FIRST_STEP + NUM_STEPS):
            engine.backward(engine(torch.ones(rows, 512)).square().mean())
            engine.step()
    return texts


@pytest.mark.slow
def test_a_batch_too_small_for_stage_3_is_told() -> None:
    """4 MiB of parameters go over a slow link thrice for each micro-step, to compute with one row."""
    done = torchrun_on_slow_link(__file__)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("stage 3 waited")]
    assert len(told) == 2
    for text in told:
        assert "with 1 sample on a rank at a time" in text
        assert "raise train_micro_batch_size_per_gpu (now 1)" in text


def _train(rank: int, size: int, rows: int, stage: int) -> list[str]:
    return train(rows, stage)


@pytest.mark.parametrize(("rows", "stage"), [(3000, 3), (1, 2)])
def test_no_advice_where_there_is_no_reason(rows: int, stage: int) -> None:
    assert run_ranks(_train, 2, rows, stage) == [[], []]


def test_a_host_without_room_for_states_is_told() -> None:
    """Before anything is trained, with the smallest budget that would do."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    numel = sum(p.numel() for p in model.parameters())
    settings: dict[str, Any] = config(bf16={"enabled": True}, tiermem={"host_memory": "16MiB"})
    with pytest.raises(BudgetError, match=r"host_memory is 16\.0 MiB.*the smallest") as caught:
        tiermem.initialize(model=model, config=settings)
    assert "'nvme'" in str(caught.value)
    found = int(str(caught.value).split("the smallest")[1].split("(")[1].split(" bytes")[0])
    # 2 + 2 + 4 + 4 bytes of parameter, remainder and moments, and gradients that wait: 2
    assert numel * 14 <= found <= numel * 14 + (1 << 20)


def test_batch_sizes_that_do_not_fit_are_told() -> None:
    with pytest.raises(tiermem.errors.ConfigError, match="train_batch_size 7") as caught:
        tiermem.initialize(model=make_net(), config=config(train_batch_size=7))
    for word in ("train_micro_batch_size_per_gpu 4", "gradient_accumulation_steps", "1 rank"):
        assert word in str(caught.value)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    print("\n".join(train(1, 3)), flush=True)
    torch.distributed.destroy_process_group()
