"""Ctrl-C at any moment: the loop may go on as if nothing had happened, and nothing waits for ever."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from training_rig import Recipe, batches, digest, run_directories, sharded, tier_config, train

import tiermem
from tiermem.errors import StateError

Drives = Callable[[int], list[str]]
RECIPE = Recipe(steps=8)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Sends SIGINT to this process, unless the block ends before. Python swallows what is raised in
    the finalizers of garbage (such as earlier tests'), so there is no collection meanwhile."""
    over = threading.Event()

    def send() -> None:
        if not over.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    gc.disable()
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for _ in range(10):  # one that was sent is raised by now
            time.sleep(0)
        gc.enable()


def config_of(paths: list[str], host_memory: int = 3 << 20) -> dict[str, object]:
    return tier_config(
        params="nvme", optimizer="nvme", paths=paths, host_memory=host_memory, resident_memory=0
    )


def train_interrupted(paths: list[str], seed: int, host_memory: int) -> tuple[str, int]:
    """A pass that is interrupted is tried again after ``zero_grad()``. How often that was."""
    rng = random.Random(seed)
    data = batches(RECIPE.steps)
    count = 0
    with sharded(config_of(paths, host_memory), RECIPE) as (_, model, optimizer):
        losses = []
        for tokens, targets in data:
            for attempt in range(6):
                try:
                    with interrupt_after(rng.random() * 0.03 if attempt < 5 else 1e6):
                        loss = model(tokens, targets)
                        loss.backward()
                    break
                except KeyboardInterrupt:
                    count += 1
                    optimizer.zero_grad()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        return digest(losses, model, optimizer), count


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.slow)])
@pytest.mark.parametrize("host_memory", [3 << 20, 16 << 20])
def test_interrupted_passes_can_be_repeated_and_change_nothing(
    host_memory: int, seeds: range, drives: Drives
) -> None:
    expected = train(tier_config(), RECIPE).digest
    total = 0
    for seed in seeds:
        paths = drives(1)
        got, count = train_interrupted(paths, seed, host_memory)
        assert got == expected
        assert run_directories(paths) == []
        total += count
    assert total > 10


def test_an_interrupt_while_something_is_under_way_is_raised_at_its_end(
    drives: Drives, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharded(config_of(drives(1)), RECIPE) as (runtime, model, optimizer):
        model(*batches(1)[0]).backward()
        optimizer.step()
        apply = runtime.gather.apply_pending

        def interrupted_first() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            apply()

        monkeypatch.setattr(runtime.gather, "apply_pending", interrupted_first)
        with pytest.raises(KeyboardInterrupt):
            runtime.drain()
        monkeypatch.undo()
        assert all(group.pending is None for group in runtime.groups)
        assert not runtime.torn
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        model(*batches(1)[0]).backward()


def test_a_second_interrupt_is_raised_at_once_and_tears_the_run(drives: Drives) -> None:
    with sharded(config_of(drives(1)), RECIPE) as (runtime, model, _):
        with runtime.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
                pytest.fail("not raised", pytrace=False)
            runtime.interrupts._noted = False  # the first is not of interest here
        assert runtime.torn
        with pytest.raises(StateError, match="checkpoint"):
            model(*batches(1)[0])


def test_another_handler_is_called_when_the_section_is_over(drives: Drives) -> None:
    called: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    with tiermem.Runtime(config_of(drives(1))) as runtime:
        with runtime.interrupts, runtime.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            assert not called
        assert called == [signal.SIGINT]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_is_left_alone(handler: signal.Handlers, drives: Drives) -> None:
    with tiermem.Runtime(config_of(drives(1))) as runtime:
        signal.signal(signal.SIGINT, handler)
        with runtime.interrupts:
            assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_can_train(drives: Drives) -> None:
    """Signals are the main thread's; a runtime in another one does not touch them."""
    results: list[str] = []
    paths = drives(1)
    thread = threading.Thread(target=lambda: results.append(train(config_of(paths), RECIPE).digest))
    thread.start()
    while thread.is_alive():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        thread.join(0.01)
    torch.set_num_threads(1)
    assert results == [train(tier_config(), RECIPE).digest]
