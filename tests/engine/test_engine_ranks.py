"""Engines on two ranks: the same steps at every stage, data shared out, mistakes told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_rig import batch, config, make_net
from ranks import run_ranks
from torch.utils.data import TensorDataset

import tiermem
import tiermem.engine.loader
from tiermem.errors import ConfigError


def _train(rank: int, size: int, stage: int, micro_steps: int) -> list[Any]:
    torch.set_num_threads(1)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 300}
    settings = config(
        zero_optimization=zero,
        train_micro_batch_size_per_gpu=None,
        train_batch_size=4 * micro_steps * size,
        gradient_accumulation_steps=micro_steps,
        gradient_clipping=0.5,
    )
    engine, *_ = tiermem.initialize(model=make_net(rank), config=settings)  # the first rank's counts
    with engine:
        assert engine.train_micro_batch_size_per_gpu() == 4
        for number in range(2 * micro_steps):
            loss = engine(batch(10 * number + rank)).square().mean()
            engine.backward(loss)
            engine.step()
        return [engine.get_global_grad_norm()] + [
            tiermem.full_param(p).numpy() for p in engine.module.parameters()
        ]


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_every_stage_gives_the_same_bits(micro_steps: int) -> None:
    """Of several micro-steps stages 0 and 1 reduce the sum, 2 and 3 each: they differ by rounding."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(2):
        for micro in range(micro_steps):
            for rank in range(2):
                number = 10 * (step * micro_steps + micro) + rank
                (model(batch(number)).square().mean() / (2 * micro_steps)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    results = [out for stage in (0, 1, 2, 3) for out in run_ranks(_train, 2, stage, micro_steps)]
    for index, (found_norm, *values) in enumerate(results):
        assert found_norm == pytest.approx(float(norm), rel=1e-4)
        like = results[0 if micro_steps == 1 or index < 4 else 4][1:]
        for value, first, plain in zip(values, like, model.parameters(), strict=True):
            assert (value == first).all()
            torch.testing.assert_close(torch.from_numpy(value), plain.detach(), rtol=1e-4, atol=1e-5)


def _load(rank: int, size: int) -> list[list[list[int]]]:
    data = TensorDataset(torch.arange(22))
    engine, _, loader, _ = tiermem.initialize(
        model=make_net(),
        config=config(dataloader_drop_last=True),
        training_data=data,
        collate_fn=lambda rows: torch.stack([row[0] for row in rows]),
    )
    with engine:
        assert loader is engine.training_dataloader
        return [[each.tolist() for each in loader] for _ in range(2)]


def test_each_rank_loads_its_share_and_every_pass_shuffles_anew() -> None:
    first, second = run_ranks(_load, 2)
    for epoch in range(2):
        seen = [n for loaded in (first, second) for rows in loaded[epoch] for n in rows]
        assert [len(rows) for rows in first[epoch]] == [4, 4]
        assert len(set(seen)) == len(seen) == 16
    assert first[0] != first[1]


def _mismatch(rank: int, size: int) -> str:
    try:
        tiermem.initialize(model=make_net(), config=config(train_batch_size=4))
    except ConfigError as error:
        return str(error)
    return ""


def test_batch_sizes_that_do_not_fit_the_ranks() -> None:
    for message in run_ranks(_mismatch, 2):
        assert "2 ranks" in message
        assert "train_batch_size 4" in message
        assert "train_micro_batch_size_per_gpu 2" in message


def test_a_pass_may_be_taken_call_by_call() -> None:
    with_next, with_for = [
        tiermem.engine.loader.EpochLoader(
            TensorDataset(torch.arange(8)), 4, rank=0, world_size=1, drop_last=False
        )
        for _ in range(2)
    ]
    taken = [next(with_next)[0].tolist() for _ in range(2)]
    with pytest.raises(StopIteration):
        next(with_next)
    assert taken == [each[0].tolist() for each in with_for]
    assert next(with_next)[0].tolist() == next(iter(with_for))[0].tolist()  # the second pass
