"""Old and other names mean what today's do, and say what these are; two that differ are a mistake."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed_rig import acting, merged, nested, problem

from tiermem.config import read_deepspeed
from tiermem.config.deepspeed_keys import KEYS

ZERO = "zero_optimization"
STAGE3 = {ZERO: {"stage": 3}}
VALUES = {
    "bool": (True, False),
    "int": (7, 9),
    "choice": ("bf16", "fp16"),
    "object": ({"enabled": True}, {"enabled": False}),
}
ALIASES = [(alias, key) for key in KEYS for alias in key.aliases]
CPU = {"device": "cpu"}
UNLOCKED = {"pin_memory": False}
LEGACY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {ZERO: {"stage": 2, "cpu_offload": True}},
        {ZERO: {"stage": 2, "offload_optimizer": CPU}},
    ),
    ({ZERO: {"stage": 2, "cpu_offload": False}}, {ZERO: {"stage": 2}}),
    (
        {ZERO: {"stage": 3, "cpu_offload_param": True}},
        {ZERO: {"stage": 3, "offload_param": CPU}},
    ),
    (
        {ZERO: {"stage": 3, "cpu_offload_use_pin_memory": False}},
        {ZERO: {"stage": 3, "offload_param": UNLOCKED, "offload_optimizer": UNLOCKED}},
    ),
    ({ZERO: True}, {ZERO: {"stage": 1}}),
    ({ZERO: False}, {ZERO: {"stage": 0}}),
    (
        {ZERO: True, "allgather_size": 1000},
        {ZERO: {"stage": 1, "allgather_bucket_size": 1000}},
    ),
    ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
    (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}}},
        {"optimizer": {"type": "AdamW"}, "gradient_clipping": 0.5},
    ),
]


@pytest.mark.parametrize(("alias", "key"), ALIASES, ids=[alias for alias, _ in ALIASES])
def test_another_name_means_the_same_and_one_line_says_todays(alias: str, key: Any) -> None:
    for value in VALUES[key.kind]:
        old = read_deepspeed(merged(STAGE3, nested(alias, value)))
        today = read_deepspeed(merged(STAGE3, nested(key.name, value)))
        assert acting(old) == acting(today)
        more = [note for note in old.notes if note not in today.notes]
        assert any(alias in note and key.name in note for note in more)


@pytest.mark.parametrize(("alias", "key"), ALIASES, ids=[alias for alias, _ in ALIASES])
def test_two_names_of_one_key_must_agree(alias: str, key: Any) -> None:
    one, other = VALUES[key.kind]
    if key.kind == "object":
        alias, name, (one, other) = f"{alias}.enabled", f"{key.name}.enabled", (True, False)
    else:
        name = key.name
    read_deepspeed(merged(STAGE3, nested(alias, one), nested(name, one)))
    for first, second in ((alias, name), (name, alias)):
        line = problem(merged(STAGE3, nested(first, one), nested(second, other)))
        assert first in line
        assert second in line
        assert "keep one of them" in line


@pytest.mark.parametrize(("old", "today"), LEGACY)
def test_an_old_key_means_what_is_written_today(old: dict[str, Any], today: dict[str, Any]) -> None:
    read = read_deepspeed(old)
    assert acting(read) == acting(read_deepspeed(today))
    assert any("old" in note for note in read.notes)


@pytest.mark.parametrize(
    "config",
    [
        {ZERO: {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
        {ZERO: {"cpu_offload": False, "offload_optimizer": {"device": "cpu"}}},
        {ZERO: {"cpu_offload_use_pin_memory": True, "offload_param": {"pin_memory": False}}},
        {"fp32_allreduce": True, "communication_data_type": "bf16", "bf16": {"enabled": True}},
        {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 0.5}}},
        {ZERO: {"max_live_parameters": "auto", "stage3_max_live_parameters": 5}},
    ],
)
def test_an_old_key_and_todays_must_agree(config: dict[str, Any]) -> None:
    assert "keep one of them" in problem(config)


def test_both_names_of_threads_are_current() -> None:
    for aio in (
        {"thread_count": 4},
        {"intra_op_parallelism": 4},
        {"thread_count": 4, "intra_op_parallelism": 4},
    ):
        (note,) = read_deepspeed({"aio": aio}).notes
        assert "has no effect here" in note
    line = problem({"aio": {"thread_count": 4, "intra_op_parallelism": 8}})
    assert line == "aio.intra_op_parallelism: says 8, but aio.thread_count says 4; keep one of them"


def test_clipping_given_twice_alike_is_fine() -> None:
    config = read_deepspeed(
        {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}
    )
    assert config.gradient_clipping == 1.0
    assert config.optimizer is not None
    assert "max_grad_norm" not in config.optimizer.params
