"""When one rank fails, dies or does something else, the others end within seconds and say why: never
wrong results, never a time-out of minutes."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_rig import batch, build
from ranks import rank_outcomes
from torch import nn

import tiermem
from tiermem.errors import StateError, TierIOError
from tiermem.io import Fault, FaultKind, Op

TIMEOUT_S = 60
"""Ends a test that hangs. What really comes takes seconds, of which starting and closing are most."""

CONFIG: dict[str, Any] = {
    "device": "cpu",
    "host_memory": "64MiB",
    "optimizer": "nvme",
    "resident_memory": 0,
    "persistence_threshold_numel": 1000,
}


@dataclass
class Run:
    """One rank's training; ``odd``: it is the rank that does what the test is about."""

    rank: int
    odd: bool
    runtime: tiermem.Runtime
    model: nn.Module
    optimizer: tiermem.optim.AdamW
    between: Callable[[], object] | None = None  # of backward and step

    def step(self, number: int) -> None:
        self.model(batch(self.rank, number, torch.float32)).square().mean().backward()
        if self.between is not None:
            self.between()
        self.optimizer.step()
        self.optimizer.zero_grad()


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def bad_batch(*_: Any) -> None:
    raise ValueError("a bad batch")


def interrupt(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def middle(run: Run) -> nn.Module:
    return run.model[1][2]


def killed_while_writing(run: Run) -> None:
    """While the optimizer worker writes states to NVMe."""
    write = run.runtime.store.write

    def write_and_die(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            write(*args, **kwargs)
            kill()
        return write(*args, **kwargs)

    run.runtime.store.write = write_and_die  # type: ignore[method-assign]


def another_branch(run: Run) -> None:
    kept = [run.model[1][i] for i in (0, 1, 3)]
    run.model[1].forward = lambda x: kept[2](kept[1](kept[0](x)))  # type: ignore[method-assign]


def look_between(run: Run, module: Callable[[nn.Sequential], nn.Module]) -> None:
    def look() -> None:
        module(run.model).weight.sum()  # type: ignore[union-attr, operator, arg-type]

    run.between = look


def fault(op: Op, code: int) -> Callable[[Run], None]:
    return lambda run: run.runtime.engine.inject(Fault(op, 3, FaultKind.ERROR, code))


ACTS: dict[str, Callable[[Run], object]] = {
    "raises between steps": bad_batch,
    "raises in forward": lambda run: middle(run).register_forward_pre_hook(bad_batch),
    "raises in backward": lambda run: middle(run).register_full_backward_hook(bad_batch),
    "raises in step": lambda run: run.optimizer.register_step_pre_hook(bad_batch),
    "interrupted in forward": lambda run: middle(run).register_forward_pre_hook(interrupt),
    "interrupted in backward": lambda run: middle(run).register_full_backward_hook(interrupt),
    "killed in forward": lambda run: middle(run).register_forward_pre_hook(kill),
    "killed in backward": lambda run: middle(run).register_full_backward_hook(kill),
    "killed in step": lambda run: run.optimizer.register_step_post_hook(kill),
    "killed while writing": killed_while_writing,
    "takes another branch": another_branch,
    "looks at the first unit before the step": lambda run: look_between(run, lambda m: m[0]),
    "looks at the last unit before the step": lambda run: look_between(run, lambda m: m[3]),
    "saves": lambda run: [v.clone() for v in run.model.state_dict().values()],
    "clips": lambda run: run.optimizer.clip_grad_norm_(1.0),
    "saves optimizer states": lambda run: [dict(s) for s in run.optimizer.state.values()],
    "cannot read": fault(Op.READ, errno.EIO),
    "cannot write": fault(Op.WRITE, errno.ENOSPC),
}

FAILED = r"^RankError: rank 1 failed: ValueError: a bad batch; see its own output"
INTERRUPTED = r"^RankError: rank 1 failed: KeyboardInterrupt: "
DIED = r"^RankError: rank 1 died without a word"
DISAGREE = r"^RankError: ranks disagree about what comes next: .*'[\w.]+( \(persistent\))?'"
EXPECTED = {
    "raises": FAILED,
    "interrupted": INTERRUPTED,
    "takes": DISAGREE,
    "looks": DISAGREE,
    "saves": DISAGREE,
    "clips": DISAGREE,
    "cannot": r"^RankError: rank 1 failed: TierIOError: .* failed: (Input/output error|No space left)",
}


def train(rank: int, size: int, config: dict[str, Any], name: str) -> str:
    """Two steps, then the last rank does what ``name`` says, then more steps."""
    model = build(torch.float32)
    try:
        with tiermem.Runtime({**CONFIG, **config}) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            run = Run(rank, rank == size - 1, runtime, model, optimizer)
            for number in range(6):
                if number == 2 and run.odd:
                    ACTS[name](run)
                run.step(number)
    except (ValueError, StateError, TierIOError, KeyboardInterrupt) as error:
        with pytest.raises(StateError, match="closed"):
            model(batch(rank, 0, torch.float32))
        return f"{type(error).__name__}: {error}"
    return "ended"


def check_nothing_is_left(path: Path, *, after_kill: bool) -> None:
    """Files of the living are gone at once; those of a killed rank when the next run begins."""
    if after_kill:
        assert any(path.iterdir())
        tiermem.Runtime({**CONFIG, "paths": [str(path)]}).close()
    assert not any(path.iterdir())


def at(stage: int, path: Path) -> dict[str, Any]:
    return {"stage": stage, "paths": [str(path)], **({"params": "nvme"} if stage == 3 else {})}


# Where nothing is exchanged, what one rank does alone is harmless.
HARMLESS = {
    (0, "saves optimizer states"),
    *((s, n) for s in (0, 2) for n in ACTS if n in ("saves", "takes another branch")),
    *((s, n) for s in (0, 2) for n in ACTS if n.startswith("looks")),
}
IN_SHORT = ["raises in forward", "takes another branch", "looks at the first unit before the step"]
SURVIVED = [name for name in ACTS if not name.startswith("killed")]
KILLED = [name for name in ACTS if name.startswith("killed")]


def train_each(rank: int, size: int, config: dict[str, Any], names: list[str]) -> list[str]:
    return [train(rank, size, config, name) for name in names]


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        pytest.param(3, IN_SHORT, id="in short"),
        *(pytest.param(s, SURVIVED, marks=pytest.mark.slow, id=f"stage {s}") for s in (3, 2, 0)),
    ],
)
@pytest.mark.timeout(300)
def test_others_end_with_the_cause(stage: int, names: list[str], tmp_path: Path) -> None:
    """One after another in the same processes: a failed run leaves nothing that disturbs the next."""
    config = at(stage, tmp_path)
    outcomes = rank_outcomes(train_each, 2, config, names, timeout_s=TIMEOUT_S * len(names) / 2)
    assert [each.error for each in outcomes] == ["", ""]
    for name, *said in zip(names, *(each.value for each in outcomes), strict=True):
        if (stage, name) in HARMLESS:
            assert said == ["ended", "ended"], name
        else:
            assert re.search(EXPECTED[name.split()[0]], said[0]), f"{name}: {said[0]}"
    check_nothing_is_left(tmp_path, after_kill=False)


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        pytest.param(s, n, marks=() if (s, n) == (3, "killed while writing") else pytest.mark.slow)
        for s in (3, 2, 0)
        for n in KILLED
    ],
)
def test_others_end_when_a_rank_is_killed(stage: int, name: str, tmp_path: Path) -> None:
    outcomes = rank_outcomes(train, 2, at(stage, tmp_path), name, timeout_s=TIMEOUT_S)
    assert outcomes[0].error == ""
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert re.search(DIED, outcomes[0].value), outcomes[0].value
    check_nothing_is_left(tmp_path, after_kill=True)


def steps_by_rank(rank: int, size: int, config: dict[str, Any], counts: list[int]) -> str:
    model = build(torch.float32)
    try:
        with tiermem.Runtime({**CONFIG, **config}) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            run = Run(rank, False, runtime, model, optimizer)
            for number in range(counts[rank]):
                run.step(number)
    except StateError as error:
        return str(error)
    return "ended"


@pytest.mark.parametrize("stage", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_another_number_of_steps(stage: int, tmp_path: Path) -> None:
    outcomes = rank_outcomes(steps_by_rank, 2, at(stage, tmp_path), [3, 2], timeout_s=TIMEOUT_S)
    assert re.match(r"rank 1 closed its runtime .*: all ranks must run the same", outcomes[0].value)
    check_nothing_is_left(tmp_path, after_kill=False)


def extra_backward(rank: int, size: int, config: dict[str, Any]) -> str:
    """The last rank takes one micro-step more than the others."""
    model = build(torch.float32)
    try:
        with tiermem.Runtime({**CONFIG, **config}) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            for number in range(4):
                for _ in range(2 if rank == size - 1 and number == 1 else 1):
                    model(batch(rank, number, torch.float32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except StateError as error:
        return str(error)
    return "ended"


@pytest.mark.slow
def test_another_number_of_micro_steps(tmp_path: Path) -> None:
    """At stage 0 nothing else is exchanged: the gradients of two steps must not be taken for one."""
    outcomes = rank_outcomes(extra_backward, 2, at(0, tmp_path), timeout_s=TIMEOUT_S)
    assert "ranks disagree about what comes next" in outcomes[0].value
    assert "ranks disagree about what comes next" in outcomes[1].value


def initialiser(rank: int, size: int) -> Callable[[nn.Module, str], None]:
    def init(module: nn.Module, name: str) -> None:
        if rank == size - 1 and name == "1.2.0":
            bad_batch()
        module.reset_parameters()  # type: ignore[operator]

    return init


def set_up(rank: int, size: int, path: str, name: str) -> str:
    """Something is wrong on the last rank before the first step."""
    odd = rank == size - 1
    config = {**CONFIG, "paths": [path]}
    if name == "constructor" and odd:
        config["paths"] = [path + "/missing"]
    if name == "budget" and odd:
        config["host_memory"] = "64KiB"
    if name == "configuration" and odd:
        config["max_live_numel"] = 5
    try:
        with tiermem.Runtime(config) as runtime:
            if name == "before" and odd:
                bad_batch()
            model = build(torch.float32)
            if name == "model" and odd:
                model[1][2][0] = nn.Linear(96, 97)
            if name == "buffers" and odd:
                model.register_buffer("mask", torch.ones(3))
            if name == "initialiser":
                model = model.to("meta")
            tiermem.shard(model, runtime, init=initialiser(rank, size))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


SET_UP = {
    "constructor": "RankError: rank 1 failed: ConfigError: path .*missing",
    "before": "RankError: rank 1 failed: ValueError: a bad batch",
    "budget": "RankError: rank 1 failed: BudgetError: host_memory is 64.0 KiB",
    "initialiser": "RankError: rank 1 failed: ValueError: a bad batch",
    "configuration": r"StateError: rank 1 and rank 0 do not .* in: max_live_numel \(here None\)",
    "model": "StateError: rank 1 and rank 0 do not shard alike; .* shapes, dtypes or requires_grad",
    "buffers": "StateError: rank 1 and rank 0 do not shard alike; .*buffers",
}


def set_up_each(rank: int, size: int, path: str, names: list[str]) -> list[str]:
    return [set_up(rank, size, path, name) for name in names]


def test_one_rank_fails_before_the_first_step(tmp_path: Path) -> None:
    """One after another in the same processes: a failed start leaves nothing that disturbs the next."""
    names = list(SET_UP)
    outcomes = rank_outcomes(set_up_each, 2, str(tmp_path), names, timeout_s=TIMEOUT_S)
    assert [each.error for each in outcomes] == ["", ""]
    for name, said in zip(names, outcomes[0].value, strict=True):
        assert re.search(SET_UP[name], said), f"{name}: {said}"
    check_nothing_is_left(tmp_path, after_kill=False)


def full_drive(rank: int, size: int, paths: list[str]) -> str:
    model = build(torch.float32)
    try:
        with tiermem.Runtime({**CONFIG, "paths": [paths[rank]]}) as runtime:
            tiermem.shard(model, runtime)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


def test_one_rank_has_a_full_drive(tmp_path: Path, mount: Callable[..., Path]) -> None:
    paths = [str(tmp_path), str(mount(64 << 10))]
    outcomes = rank_outcomes(full_drive, 2, paths, timeout_s=TIMEOUT_S)
    assert outcomes[1].value.startswith("TierIOError")
    assert "rank 1 failed: TierIOError" in outcomes[0].value


def interrupted_together(rank: int, size: int, path: str) -> str:
    """Ctrl-C in a terminal goes to all ranks at once."""
    model = build(torch.float32)
    config = {**CONFIG, **at(3, Path(path))}
    try:
        with tiermem.Runtime(config) as runtime:
            tiermem.shard(model, runtime)
            optimizer = tiermem.optim.AdamW(model.parameters(), lr=1e-2)
            run = Run(rank, False, runtime, model, optimizer)
            run.step(0)
            threading.Timer(0.3 + 0.01 * rank, interrupt).start()
            for number in range(1, 100_000):
                run.step(number)
    except (KeyboardInterrupt, StateError) as error:
        return type(error).__name__
    return "ended"


def test_interrupting_all_ranks(tmp_path: Path) -> None:
    outcomes = rank_outcomes(interrupted_together, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    assert {each.value for each in outcomes} <= {"KeyboardInterrupt", "RankError"}, outcomes
    assert "KeyboardInterrupt" in [each.value for each in outcomes]
    check_nothing_is_left(tmp_path, after_kill=False)
