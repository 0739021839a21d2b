"""After ``close()``, and in forked children, use raises and says why."""

from __future__ import annotations

import gc
import os
import threading
import traceback
import warnings

import pytest
import torch
from zero_models import loss_of
from zero_twins import batch, settings

import tiermem
from tiermem.errors import StateError
from tiermem.zero.update import UpdatePipeline

USES = {
    "forward": lambda t: loss_of(t.model, batch(0)),
    "evaluation": lambda t: torch.no_grad()(loss_of)(t.model, batch(0)),
    "parameter": lambda t: t.model.head.weight.sum(),
    "persistent parameter": lambda t: t.model.blocks[0].norm.weight.sum(),
    "full_param": lambda t: tiermem.full_param(t.model.head.weight),
    "gathered": lambda t: tiermem.gathered(t.model.head.weight).__enter__(),
    "state_dict": lambda t: t.model.state_dict(),
    "load": lambda t: t.model.load_state_dict(t.plain.state_dict()),
    "step": lambda t: t.optimizer.step(),
    "state": lambda t: t.optimizer.state[t.model.head.weight]["exp_avg"],
    "drain": lambda t: t.runtime.drain(),
    "shard": lambda t: tiermem.shard(torch.nn.Linear(4, 4), t.runtime),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close(twins, use: str) -> None:
    twins.step()
    twins.runtime.close()
    with pytest.raises(RuntimeError, match="closed"):  # torch collects those of load_state_dict
        USES[use](twins)


def test_backward_after_close(twins) -> None:
    loss = loss_of(twins.model, batch(0))
    twins.runtime.close()
    with pytest.raises(StateError, match="closed"):
        loss.backward()


def test_metadata_after_close(twins) -> None:
    twins.runtime.close()
    assert twins.model.head.weight.shape == (64, 64)
    assert repr(twins.model)


def test_views_that_outlive_the_runtime(twins) -> None:
    with torch.no_grad(), tiermem.gathered(twins.model.head.weight):
        view = twins.model.head.weight[2:5]
    expected = twins.plain.head.weight[2:5].detach().clone()
    twins.runtime.close()
    gc.collect()
    assert torch.equal(view, expected)


def test_nothing_is_left_on_the_path(twins, tmp_path) -> None:
    twins.step()
    assert any(tmp_path.iterdir())
    twins.runtime.close()
    assert not any(tmp_path.iterdir())


def test_an_error_in_the_block_is_not_hidden(tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), tiermem.Runtime(settings(tmp_path)):
        raise ZeroDivisionError
    assert not any(tmp_path.iterdir())


def test_a_forgotten_runtime_warns(tmp_path) -> None:
    runtime = tiermem.Runtime(settings(tmp_path))
    with pytest.warns(ResourceWarning, match="context manager"):
        runtime.__del__()
    runtime.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del runtime
        gc.collect()


def in_child(action) -> str:
    """What ``action`` returns or raises in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            text = str(action())
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode()[-3000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("use", ["forward", "parameter", "state_dict", "step", "state", "drain"])
def test_forked_child_is_refused_and_the_parent_goes_on(twins, use: str) -> None:
    twins.steps(2)
    text = in_child(lambda: USES[use](twins))
    assert "StateError" in text
    assert "forked" in text
    twins.steps(2, first=2)
    twins.check()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_close_in_a_forked_child_does_nothing(twins, tmp_path) -> None:
    twins.steps(2)
    before = sorted(tmp_path.rglob("*"))
    assert in_child(lambda: twins.runtime.close()) == "None"
    assert sorted(tmp_path.rglob("*")) == before
    twins.steps(2, first=2)
    twins.check()


def test_closing_a_torn_run_says_what_tore_it(twins, monkeypatch) -> None:
    """An update under way may read what is undefined since then: that is no further error."""
    loss_of(twins.model, batch(1)).backward()
    entered, torn = threading.Event(), threading.Event()

    def read_what_failed(*_: object) -> None:
        entered.set()
        assert torn.wait(30)
        raise StateError("record a is undefined since a write of it failed")

    monkeypatch.setattr(UpdatePipeline, "_apply", read_what_failed)
    twins.optimizer.step()
    first = next(group for group in twins.runtime.groups if group.pending is not None)
    twins.runtime.gather.gather(first, demand=True)  # starts its update
    assert entered.wait(30)
    twins.runtime.mark_torn(OSError("a write failed"))
    torn.set()
    twins.runtime.close()
