"""A failed transfer at any point of a step: raised with its place, then either training goes on with
the same bits or the run is TORN and refuses everything. Never silently wrong, never a hang."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_rig import (
    Recipe,
    batches,
    best_backend,
    digest,
    make_model,
    run_directories,
    tier_config,
)

import tiermem
from tiermem.errors import StateError, TierIOError
from tiermem.io import Fault, FaultKind, Op

Drives = Callable[[int], list[str]]
pytestmark = pytest.mark.timeout(150)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the error in the log of every torn run."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


DATA = batches(3)
DISTURBED = 1  # the step that the fault falls into

CONFIGS: dict[str, dict[str, Any]] = {
    "deferred-spilled": {"host_memory": 2_500_000},
    "deferred-kept": {"host_memory": 16 << 20},
    "deferred-no-prefetch": {"host_memory": 16 << 20, "prefetch_bytes": 0, "sub_group_numel": 8192},
    "backward": {"host_memory": 2_500_000, "update": "backward"},
}


def config_of(name: str, paths: list[str], **changes: Any) -> dict[str, Any]:
    return tier_config(
        params="nvme",
        optimizer="nvme",
        paths=paths,
        resident_memory=0,
        **(CONFIGS[name] | changes),
    )


@dataclass
class Story:
    """What happened to one run with a fault in step `DISTURBED`."""

    errors: list[TierIOError] = field(default_factory=list)
    refusal: StateError | None = None
    value: str | None = None
    reads: int = 0
    writes: int = 0


class Loop:
    """A training loop that tries a phase again when it fails with an I/O error: forward and backward
    together after ``zero_grad()``, ``step()`` and ``drain()`` by themselves."""

    def __init__(self, runtime: tiermem.Runtime, story: Story) -> None:
        self.runtime = runtime
        self.story = story
        self.model: nn.Module = tiermem.shard(make_model(), runtime)
        self.optimizer = tiermem.optim.AdamW(self.model.parameters(), **Recipe().options)
        self.losses: list[float] = []

    def attempt(self, action: Callable[[], Any], before_retry: Callable[[], Any] | None = None) -> Any:
        try:
            return action()
        except TierIOError as error:
            self.story.errors.append(error)
        if before_retry is not None:
            before_retry()
        return action()

    def forward_backward(self, step: int) -> float:
        loss = self.model(*DATA[step])
        loss.backward()
        return float(loss.detach())

    def step(self, step: int) -> None:
        loss = self.attempt(lambda: self.forward_backward(step), self.optimizer.zero_grad)
        self.losses.append(loss)
        self.attempt(self.optimizer.step)
        self.attempt(self.optimizer.zero_grad)

    def drain(self) -> None:
        self.attempt(self.runtime.drain)


@contextmanager
def opened(config: dict[str, Any], story: Story) -> Iterator[Loop]:
    """Closes, and says if that raises."""
    runtime = tiermem.Runtime(config)
    try:
        yield Loop(runtime, story)
    finally:
        try:
            runtime.close()
        except TierIOError as error:
            story.errors.append(error)


def tell(config: dict[str, Any], fault: Fault | None) -> Story:
    story = Story()
    with opened(config, story) as loop:
        for step in range(DISTURBED):
            loop.step(step)
        loop.drain()
        before = loop.runtime.engine.stats()
        loop.runtime.engine.inject(fault)
        try:
            loop.step(DISTURBED)
            loop.drain()
            after = loop.runtime.engine.stats()
            story.reads = after.read_chunks - before.read_chunks
            story.writes = after.written_chunks - before.written_chunks
            loop.runtime.engine.inject(None)
            loop.step(DISTURBED + 1)
            story.value = digest(loop.losses, loop.model, loop.optimizer)
        except StateError as error:
            story.refusal = error
            assert_torn(loop)
        except TierIOError as error:
            story.errors.append(error)  # twice: only right where it stays an error for good
            story.refusal = assert_torn(loop)
    for path in config["paths"]:
        assert run_directories([path]) == []
    return story


def assert_torn(loop: Loop) -> StateError:
    """Every way to go on is refused, with the remedy."""
    loop.runtime.engine.inject(None)
    refused = None
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: loop.model(*DATA[0]),
        "evaluation": lambda: torch.no_grad()(loop.model)(*DATA[0]),
        "step": loop.optimizer.step,
        "optimizer state": lambda: [dict(s) for s in loop.optimizer.state_dict()["state"].values()],
        "state_dict": lambda: [v.clone() for v in loop.model.state_dict().values()],
        "full_param": lambda: tiermem.full_param(next(loop.model.parameters())),
        "drain": loop.runtime.drain,
    }
    for name, use in uses.items():
        with pytest.raises(StateError, match="checkpoint") as caught:
            use()
            pytest.fail(f"{name} works after the run was torn", pytrace=False)
        refused = caught.value
    assert loop.runtime.torn
    assert refused is not None
    return refused


def check_place(error: TierIOError, op: Op, paths: list[str]) -> None:
    context = error.context
    assert error.errno == errno.EIO
    assert context.operation == ("read" if op is Op.READ else "write")
    assert any(Path(context.path).is_relative_to(path) for path in paths)
    assert context.offset % 4096 == 0
    assert context.length > 0
    assert context.record
    for part in (
        context.operation,
        context.path,
        str(context.offset),
        str(context.length),
        context.record,
    ):
        assert part in str(error)


def check_every(
    name: str, op: Op, paths: list[str], config: dict[str, Any], stride: int = 1
) -> tuple[int, int]:
    """Faults at every ``stride``-th chunk of ``op``; how often it went on, how often it was torn."""
    undisturbed = tell(config, None)
    assert undisturbed.value is not None
    count = undisturbed.reads if op is Op.READ else undisturbed.writes
    assert count > 5
    went_on, torn, problems = 0, 0, []
    for nth in range(0, count, stride):
        try:
            story = tell(config, Fault(op, nth, FaultKind.ERROR, errno.EIO))
            done = story.reads if op is Op.READ else story.writes
            if story.value == undisturbed.value and not story.errors and done <= nth:
                continue  # this time there were fewer: how much is fetched again depends on timing
            assert story.errors, "the error was lost"
            for error in story.errors:
                check_place(error, op, paths)
            if story.refusal is not None:
                assert "checkpoint" in str(story.refusal)
                torn += 1
            else:
                assert len(story.errors) == 1
                assert story.value == undisturbed.value, "silently wrong"
                went_on += 1
        except (AssertionError, pytest.fail.Exception, tiermem.errors.TierMemError) as error:
            problems.append(f"{op.name.lower()} {nth} of {count}: {type(error).__name__} {error}")
    if problems:
        pytest.fail(f"{name}: {len(problems)} problems\n" + "\n".join(problems), pytrace=False)
    return went_on, torn


NAMES = [
    "deferred-spilled",
    pytest.param("deferred-kept", marks=pytest.mark.slow),
    pytest.param("deferred-no-prefetch", marks=pytest.mark.slow),
    "backward",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_failed_read_raises_and_then_goes_on_or_is_torn(name: str, drives: Drives) -> None:
    paths = drives(1)
    went_on, torn = check_every(name, Op.READ, paths, config_of(name, paths))
    if "sub_group_numel" in CONFIGS[name]:  # a group's later slices are read after earlier were written
        assert went_on > 0
    elif name != "backward":  # nothing was written when a read failed before the first write
        assert went_on > torn


@pytest.mark.parametrize("name", NAMES)
def test_every_failed_write_raises_and_then_goes_on_or_is_torn(name: str, drives: Drives) -> None:
    paths = drives(1)
    went_on, torn = check_every(name, Op.WRITE, paths, config_of(name, paths))
    assert torn > 0  # states were written in part
    if name == "deferred-spilled":
        assert went_on > 0  # gradients can be computed again


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["libaio", "io_uring", "native_threads", "threads"])
@pytest.mark.parametrize("op", list(Op), ids=lambda op: op.name.lower())
@pytest.mark.parametrize("name", CONFIGS)
def test_every_chunk_of_striped_records_on_three_paths(
    name: str, op: Op, backend: str, drives: Drives
) -> None:
    paths = drives(3)
    config = config_of(
        name,
        paths,
        stripe_bytes=16 << 10,
        path_weights=[1.0, 2.0, 0.7],
        io={"backend": backend, "chunk_bytes": 16 << 10},
    )
    check_every(name, op, paths, config)


INVISIBLE = {
    "short": (FaultKind.SHORT, 0),
    "EINTR": (FaultKind.SUBMIT_ERROR, errno.EINTR),
    "EAGAIN": (FaultKind.SUBMIT_ERROR, errno.EAGAIN),
    "partial-submit": (FaultKind.PARTIAL_SUBMIT, 0),
}


@pytest.mark.parametrize("backend", ["libaio", "io_uring", "native_threads", "threads"])
@pytest.mark.parametrize("kind", INVISIBLE)
def test_short_and_interrupted_transfers_are_not_seen(kind: str, backend: str, drives: Drives) -> None:
    config = config_of("deferred-spilled", drives(1), io={"backend": backend})
    undisturbed = tell(config, None)
    fault, code = INVISIBLE[kind]
    for op in Op:
        for nth in (0, 13):
            story = tell(config, Fault(op, nth, fault, code, repeat=3))
            assert story.errors == []
            assert story.refusal is None
            assert story.value == undisturbed.value


@pytest.mark.parametrize("op", list(Op), ids=lambda op: op.name.lower())
def test_a_fault_while_the_model_is_sharded_is_raised_and_leaves_nothing(
    op: Op, drives: Drives
) -> None:
    paths = drives(1)
    runtime = tiermem.Runtime(config_of("deferred-kept", paths))
    model = make_model()
    runtime.engine.inject(Fault(op, 1, FaultKind.ERROR, errno.EIO))
    errors: list[TierIOError] = []
    for action in (lambda: tiermem.shard(model, runtime), runtime.drain, runtime.close):
        try:
            action()
        except TierIOError as error:
            errors.append(error)
        except StateError:
            assert errors
    assert bool(errors) or op is Op.READ  # sharding may read nothing
    runtime.close()
    assert run_directories(paths) == []


def test_errors_at_the_very_end_are_raised_by_close(drives: Drives) -> None:
    """The last update is applied by close(): its failure must not be lost."""
    paths = drives(1)
    runtime = tiermem.Runtime(config_of("deferred-kept", paths))
    model = tiermem.shard(make_model(), runtime)
    optimizer = tiermem.optim.AdamW(model.parameters())
    model(*DATA[0]).backward()
    optimizer.step()
    runtime.engine.inject(Fault(Op.WRITE, 3, FaultKind.ERROR, errno.EIO))
    with pytest.raises((TierIOError, StateError)):
        runtime.close()
    runtime.close()
    assert run_directories(paths) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_read_for_a_failed_update_does_not_disturb_its_repetition(drives: Drives) -> None:
    """The other reads of the failed slice may still be in flight when it is tried again: many times,
    since it takes a rare order of completions."""
    paths = drives(3)
    config = config_of(
        "deferred-kept",
        paths,
        stripe_bytes=16 << 10,
        path_weights=[1.0, 2.0, 0.7],
        io={"backend": best_backend(), "chunk_bytes": 16 << 10},
    )
    expected = tell(config, None).value
    for number in range(400):
        story = tell(config, Fault(Op.READ, 4 * (number % 3), FaultKind.ERROR, errno.EIO))
        assert story.refusal is None
        assert story.value == expected, number
