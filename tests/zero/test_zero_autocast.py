"""Autocast on sharded fp32 parameters is torch's autocast."""

from __future__ import annotations

import pytest
import torch
from zero_models import Attention, Checkpointed, Plain, Reused, Tied
from zero_twins import batch


def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(tokens).float().square().mean()


@pytest.mark.parametrize("mode", ["deferred", "backward"])
@pytest.mark.parametrize("build", [Plain, Tied, Checkpointed, Attention])
def test_three_steps(make_twins, build, mode: str) -> None:
    twins = make_twins(build, loss=loss, update=mode)
    twins.steps(3)
    twins.check()


def test_weights_used_several_times(make_twins) -> None:
    """torch casts a weight once and sums its gradients in bf16; without the cache each use sums in
    fp32. Close, not equal."""
    twins = make_twins(Reused, loss=loss)
    twins.steps(2)
    plain, sharded = zip(*twins.losses, strict=True)
    assert sharded == pytest.approx(plain, rel=1e-2)


def test_weights_are_cast_again_after_a_step(twins) -> None:
    """One autocast region over several steps: torch's own cache would go stale; ours must not."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = twins.model(batch(0)).float().square().mean()
    first.backward()
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = twins.model(batch(0)).float().square().mean().item()
        loss_again = twins.model(batch(0)).float().square().mean()
        loss_again.backward()
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        after = twins.model(batch(0)).float().square().mean().item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = twins.model(batch(0)).float().square().mean().item()
    assert before != after
    assert after == again


def test_the_users_cache_setting_is_restored(twins) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        enabled = torch.is_autocast_cache_enabled()
        twins.model(batch(0))
        assert torch.is_autocast_cache_enabled() == enabled
        with pytest.raises(RuntimeError):
            twins.model.blocks[0](torch.ones(3, 5))
        assert torch.is_autocast_cache_enabled() == enabled


def test_evaluation_under_autocast(twins) -> None:
    twins.loss = loss
    for step in range(3):
        twins.step(step)
        with torch.no_grad():
            found = [loss(model, batch(40)).item() for model, _ in twins.both]
        assert found[0] == found[1]
    twins.check()
