"""A policy that is trained and a frozen reference share one runtime and one budget, with generation
between the steps: the policy trains as the plain one does, the reference is only ever read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import VOCABULARY, Dropout
from zero_ranks import (
    CaseRunner,
    Cases,
    RankTwins,
    at_sizes,
    changes_of,
    my_rank,
    twins_on,
    world_size,
)
from zero_twins import different, settings
from zero_written import Written, groups_of

import tiermem
from tiermem.errors import StateError
from tiermem.types import round_up

STEPS = 3
EPOCHS = 2  # updates for each batch that was generated

CONTEXTS = (torch.no_grad, torch.inference_mode)


@dataclass
class Both:
    """A policy's twins and the reference's."""

    twins: RankTwins
    plain_reference: nn.Module
    reference: nn.Module
    lengths: Callable[[int], int]  # of what is generated in a step

    @property
    def pairs(self) -> Any:
        references = (self.plain_reference, self.reference)
        return [(*pair, reference) for pair, reference in zip(self.twins.both, references, strict=True)]

    def step(self, number: int) -> None:
        tokens, losses = [], []
        for policy, optimizer, reference in self.pairs:
            torch.manual_seed(100 * number + my_rank())
            tokens.append(self.generate(policy, number))
            losses.append(self.learn(policy, optimizer, reference, tokens[-1]))
        assert torch.equal(*tokens)
        self.twins.losses.extend(zip(*losses, strict=True))

    def generate(self, policy: nn.Module, number: int) -> torch.Tensor:
        """Samples from the policy, without dropout."""
        policy.eval()
        tokens = self.twins.batch(number)[:, :2]
        with CONTEXTS[number % 2]():
            for _ in range(self.lengths(number)):
                following = policy(tokens)[:, -1].softmax(-1).multinomial(1)
                tokens = torch.cat([tokens, following], 1)
        policy.train()
        return tokens.clone()

    def learn(
        self, policy: nn.Module, optimizer: Any, reference: nn.Module, tokens: Any
    ) -> list[float]:
        """Clipped policy gradients with a penalty on the divergence from the reference."""

        def chances(model: nn.Module) -> torch.Tensor:
            every = model(tokens[:, :-1]).log_softmax(-1)
            return every.gather(-1, tokens[:, 1:, None]).squeeze(-1)

        with torch.no_grad():
            fixed = chances(reference)
            before = chances(policy)
        reward = (tokens[:, 2:].float().mean(1) / VOCABULARY)[:, None]
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        losses = []
        for _ in range(EPOCHS):
            now = chances(policy)
            ratio = (now - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            divergence = (fixed - now).exp() - (fixed - now) - 1
            loss = (0.1 * divergence - gain).mean()
            loss.backward()
            self.twins.update(policy, optimizer)
            losses.append(loss.item())
        return losses


def in_turn(number: int) -> int:
    return (3, 1, 5)[number % 3]


def follow_by_loading(reference: nn.Module, policy: nn.Module) -> None:
    reference.load_state_dict(policy.state_dict())


@torch.no_grad()
def follow_slowly(reference: nn.Module, policy: nn.Module) -> None:
    """A moving average, one parameter after another."""
    for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
        with tiermem.gathered([old, new]):
            old.mul_(0.9).add_(new, alpha=0.1)


def by_rank(number: int) -> int:
    return 1 + (number + my_rank()) % 3


def placed(placement: str, stage: int) -> dict[str, Any]:
    """Room for one unit of the two at stage 3, for all of both below."""
    options: dict[str, Any] = {"host_memory": "16MiB", "optimizer": placement, "device_memory": "4MiB"}
    if stage == 3:
        options |= {"params": placement, "device_memory": "192KiB"}
    return {**changes_of(stage), **options}


def open_both(path: str, lengths: Callable[[int], int], **changes: Any) -> Both:
    runtime = tiermem.Runtime(settings(Path(path), **changes))
    twins = twins_on(runtime, Dropout)
    references = []
    for _ in range(2):
        torch.manual_seed(7)
        references.append(Dropout().requires_grad_(False).eval())
    tiermem.shard(references[1], runtime)
    return Both(twins, references[0], references[1], lengths)


def train(
    path: str, stage: int, placement: str, lengths: Callable[[int], int] = in_turn, **changes: Any
) -> None:
    both = open_both(path, lengths, **placed(placement, stage), **changes)
    runtime = both.twins.runtime
    with runtime:
        runtime.drain()
        written = Written(runtime)
        for number in range(STEPS):
            both.step(number)
        runtime.drain()
        both.twins.check()
        check_untouched(both, written)
        check_only_read(both)
        stats = runtime.stats()
        assert stats.device.peak <= stats.device.budget
        assert stats.host.peak <= stats.host.budget


def check_untouched(both: Both, written: Written) -> None:
    """The reference has its values, no states, no gradients; nothing of it was written."""
    pairs = zip(both.plain_reference.parameters(), both.reference.parameters(), strict=True)
    assert all(torch.equal(a, tiermem.full_param(b)) for a, b in pairs)
    fixed, trained = groups_of(both.reference), groups_of(both.twins.model)
    assert not any(region.states or region.initialised for g in fixed for region in g.regions)
    assert not any(g.gradient or g.gradient_record or g.partial for g in fixed)
    assert not {g.record for g in fixed} & written.records
    assert written.records & {s.record for g in trained for r in g.regions for s in r.states.values()}
    assert all(both.twins.optimizer.state.get(p) is None for p in both.reference.parameters())
    states = [round_up(4 * r.owned.numel) for g in trained for r in g.regions if r.trainable]
    placement = both.twins.runtime.stats().placement
    for moment in ("exp_avg", "exp_avg_sq"):
        assert sum(placement[moment].values()) == sum(states)


def check_only_read(both: Both) -> None:
    """A pass of the reference reads its weights from where they are, and writes nothing."""
    runtime = both.twins.runtime
    store = runtime.store.stats
    before, moved = runtime.stats(), store().copied_bytes
    with torch.no_grad():
        both.reference(both.twins.batch(0))
    runtime.drain()
    after = runtime.stats()
    assert after.written_bytes == before.written_bytes
    weights = sum(g.record_bytes for g in groups_of(both.reference) if g.record is not None)
    nvme = runtime.config.params == "nvme"
    read = after.read_bytes - before.read_bytes if nvme else store().copied_bytes - moved
    if weights:
        assert 0 < read <= weights


def follow(path: str, stage: int, how: Callable[[nn.Module, nn.Module], None]) -> None:
    """The reference takes values of the policy after every step."""
    options = placed("nvme", stage)
    if stage == 3:
        options["device_memory"] = "320KiB"  # a unit of each model at once
    both = open_both(path, in_turn, **options)
    with both.twins.runtime:
        for number in range(STEPS):
            both.step(number)
            for policy, _, reference in both.pairs:
                how(reference, policy)
        both.twins.check()
        assert different(both.plain_reference, both.reference) == []
        assert not any(region.states for g in groups_of(both.reference) for region in g.regions)


def other_lengths(path: str) -> None:
    """At stage 3 a forward needs all ranks: another number of tokens on one is said in seconds."""
    both = open_both(path, by_rank, **placed("host", 3))
    if world_size() == 1:
        with both.twins.runtime:
            both.step(0)
            both.twins.check()
        return
    with pytest.raises(StateError, match=r"as often.*loops that differ by rank"), both.twins.runtime:
        both.step(0)


CASES: Cases = {
    **{
        f"stage {stage}, {placement}": functools.partial(train, stage=stage, placement=placement)
        for stage, placement in itertools.product((3, 2), ("nvme", "host"))
    },
    "stage 3, nvme, ahead": functools.partial(train, stage=3, placement="nvme", prefetch_bytes=200_000),
    "stage 2, host, lengths by rank": functools.partial(
        train, stage=2, placement="host", lengths=by_rank
    ),
    "stage 3, host, lengths by rank": other_lengths,
    **{
        f"stage {stage}, {how.__name__}": functools.partial(follow, stage=stage, how=how)
        for stage, how in itertools.product((3, 2), (follow_by_loading, follow_slowly))
    },
}


IN_SHORT = (
    "stage 3, nvme",
    "stage 2, host",
    "stage 3, host, lengths by rank",
    "stage 3, follow_slowly",
)


@pytest.mark.parametrize(("name", "size"), at_sizes(CASES, IN_SHORT.__contains__))
def test_policy_and_reference(case_runner: CaseRunner, name: str, size: int) -> None:
    case_runner.check(CASES, name, size)


def written_bytes(path: Path, *, with_reference: bool) -> int:
    """On NVMe, by a training of the policy alone or beside its reference."""
    both = open_both(str(path), in_turn, **placed("nvme", 3))
    with both.twins.runtime as runtime:
        runtime.drain()
        start = runtime.stats().written_bytes
        for number in range(STEPS):
            tokens = both.twins.batch(number)
            with torch.no_grad():
                target = both.reference(tokens) if with_reference else both.plain_reference(tokens)
            (both.twins.model(tokens) - target).square().mean().backward()
            both.twins.update(both.twins.model, both.twins.optimizer)
        runtime.drain()
        return runtime.stats().written_bytes - start


def test_bytes_written_are_those_of_the_policy(tmp_path: Path) -> None:
    alone = written_bytes(tmp_path, with_reference=False)
    assert alone > 0
    assert written_bytes(tmp_path, with_reference=True) == alone
