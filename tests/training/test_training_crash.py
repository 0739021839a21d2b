"""What a run leaves behind: nothing when it ends, and what a killed one left goes at the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from training_rig import (
    Recipe,
    batches,
    digest,
    run_directories,
    run_steps,
    sharded,
    tier_config,
    train,
)

import tiermem

Drives = Callable[[int], list[str]]
Start = Callable[..., "subprocess.Popen[str]"]

TRAINING = textwrap.dedent(
    """
    import sys
    import torch
    from training_rig import Recipe, batches, digest, run_steps, sharded, tier_config

    torch.set_num_threads(1)  # as in the process of the tests
    update, end, paths = sys.argv[1], sys.argv[2], sys.argv[3:]
    config = tier_config(
        params="nvme", optimizer="nvme", paths=paths, update=update, host_memory=3 << 20,
        resident_memory=0,
    )
    recipe = Recipe(steps=6 if end == "finish" else 100_000)

    def say(step):
        if step in (1, 5):
            print("step", step, flush=True)

    try:
        with sharded(config, recipe) as (runtime, model, optimizer):
            if end != "finish":  # the data of the steps repeats
                data = batches(4)
                step = 0
                while True:
                    model(*data[step % 4]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    say(step)
                    step += 1
            losses = run_steps(model, optimizer, recipe, on_step=say)
            print("digest", digest(losses, model, optimizer), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(3)
    """
)


@pytest.fixture
def start(python_env: dict[str, str]) -> Iterator[Start]:
    """Starts training processes; kills and reaps what is left of them."""
    processes = []

    def begin(update: str, end: str, paths: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINING, update, end, *paths],
            env=python_env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def await_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(text):
            return
    assert process.stderr is not None
    raise AssertionError(f"ended before {text!r}: {process.stderr.read()}")


@pytest.mark.parametrize("update", ["deferred", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_killed_run_is_reclaimed_by_the_next(update: str, start: Start, drives: Drives) -> None:
    paths = drives(2)
    process = start(update, "kill", paths)
    await_line(process, "step 5")
    left = run_directories(paths)
    assert len(left) == 2
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert all(any(directory.iterdir()) for directory in left)
    expected = train(tier_config(), Recipe())
    config = tier_config(params="nvme", optimizer="nvme", paths=paths, update=update)
    with tiermem.Runtime(config):
        assert not any(directory.exists() for directory in left)
        assert len(run_directories(paths)) == 2
    assert run_directories(paths) == []
    assert train(config).digest == expected.digest


def test_a_live_run_is_not_touched_and_goes_on(start: Start, drives: Drives) -> None:
    paths = drives(1)
    process = start("deferred", "run", paths)
    await_line(process, "step 1")
    (theirs,) = run_directories(paths)
    contents = sorted(entry.name for entry in theirs.iterdir())
    with tiermem.Runtime(tier_config(params="nvme", optimizer="nvme", paths=paths)):
        assert theirs.exists()
        assert len(run_directories(paths)) == 2
    assert run_directories(paths) == [theirs]
    assert sorted(entry.name for entry in theirs.iterdir()) == contents
    await_line(process, "step 5")
    assert process.poll() is None


def test_two_processes_on_one_path_train_independently(start: Start, drives: Drives) -> None:
    paths = drives(1)
    expected = train(tier_config(), Recipe()).digest
    both = [start(update, "finish", paths) for update in ("deferred", "backward")]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert f"digest {expected}" in out
    assert run_directories(paths) == []


def test_two_runtimes_in_one_process_on_one_path_do_not_meet(drives: Drives) -> None:
    expected = train(tier_config(), Recipe(steps=3)).digest
    config = tier_config(params="nvme", optimizer="nvme", paths=drives(1), host_memory=4 << 20)
    recipe = Recipe(steps=3)
    with sharded(config, recipe) as first, sharded(config, recipe) as second:
        losses: tuple[list[float], list[float]] = ([], [])
        for batch in batches(3):
            for (_, model, optimizer), mine in zip((first, second), losses, strict=True):
                loss = model(*batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mine.append(float(loss.detach()))
        assert digest(losses[0], *first[1:]) == expected
        assert digest(losses[1], *second[1:]) == expected


@pytest.mark.parametrize("update", ["deferred", pytest.param("backward", marks=pytest.mark.slow)])
def test_an_interrupt_in_the_middle_of_a_step_ends_with_the_files_removed(
    update: str, start: Start, drives: Drives
) -> None:
    paths = drives(1)
    process = start(update, "interrupt", paths)
    await_line(process, "step 1")
    assert len(run_directories(paths)) == 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "interrupted" in out
    assert run_directories(paths) == []


def test_an_interrupt_inside_a_forward_leaves_a_usable_runtime(drives: Drives) -> None:
    """KeyboardInterrupt skips torch's forward hooks."""
    recipe = Recipe(steps=2)
    expected = train(tier_config(), recipe).digest
    config = tier_config(params="nvme", optimizer="nvme", paths=drives(1), host_memory=4 << 20)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with sharded(config, recipe) as (_, model, optimizer):
        for where in (model.blocks[0].attn, model.blocks[1].mlp.down, model.ln_f):
            handle = where.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(*batches(1)[0])
            handle.remove()
        losses = run_steps(model, optimizer, recipe)
        assert digest(losses, model, optimizer) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("delay", range(12))
def test_interrupts_at_any_time(delay: int, start: Start, drives: Drives) -> None:
    paths = drives(1)
    process = start("deferred", "interrupt", paths)
    await_line(process, "step 1")
    time.sleep(0.013 * delay)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "interrupted" in out
    assert run_directories(paths) == []


def test_a_failing_step_ends_with_the_files_removed(drives: Drives) -> None:
    paths = drives(1)
    config = tier_config(params="nvme", optimizer="nvme", paths=paths)

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    with pytest.raises(Stop), sharded(config, Recipe()) as (_, model, _optimizer):
        model(*batches(1)[0]).backward()
        model.blocks[1].register_forward_hook(stop)
        model(*batches(1)[0])
    assert run_directories(paths) == []


def test_a_runtime_that_was_never_closed_warns_and_its_files_go_with_the_next(
    python_env: dict[str, str], drives: Drives
) -> None:
    paths = drives(1)
    script = (
        "import tiermem, sys; from training_rig import tier_config; "
        "rt = tiermem.Runtime(tier_config(params='nvme', optimizer='nvme', paths=sys.argv[1:])); del rt"
    )
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", script, *paths],
        env=python_env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0
    assert "not closed" in result.stderr
    with tiermem.Runtime(tier_config(params="nvme", optimizer="nvme", paths=paths)):
        assert len(run_directories(paths)) == 1
    assert run_directories(paths) == []


def test_a_forked_child_is_refused_and_deletes_nothing(drives: Drives) -> None:
    paths = drives(1)
    recipe = Recipe(steps=2)
    config = tier_config(params="nvme", optimizer="nvme", paths=paths)
    with sharded(config, recipe) as (runtime, model, optimizer):
        run_steps(model, optimizer, recipe)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                model(*batches(1)[0])
            except tiermem.errors.StateError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                runtime.close()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        (directory,) = run_directories(paths)
        assert Path(directory, "gen0.bin").exists()
        run_steps(model, optimizer, recipe)
    assert run_directories(paths) == []
