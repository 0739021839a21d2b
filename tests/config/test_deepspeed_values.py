"""Values as people write them, and for those that cannot work an example of what does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepspeed_rig import acting, effective, merged, nested, problem, problems
from hypothesis import given
from hypothesis import strategies as st

from tiermem.config import read_deepspeed
from tiermem.config.deepspeed_keys import KEYS, TABLE
from tiermem.config.deepspeed_value import number_of, parse, shown
from tiermem.errors import ConfigError

STAGE3 = {"zero_optimization": {"stage": 3}}
INT = TABLE.keys["zero_optimization.reduce_bucket_size"]


@given(st.integers(0, 10**18))
def test_a_whole_number_is_one_however_it_is_written(number: int) -> None:
    for written in (number, str(number), f" {number} "):
        assert parse(INT, written) == number
    if float(number) == number:
        assert parse(INT, float(number)) == number
        assert parse(INT, f"{float(number)!r}") == number


@pytest.mark.parametrize(
    ("written", "number"), [("1e9", 10**9), ("5e8", 5 * 10**8), ("10", 10), (1e14, 10**14), ("0", 0)]
)
def test_numbers_from_peoples_files(written: Any, number: int) -> None:
    config = read_deepspeed(
        merged(STAGE3, nested("zero_optimization.stage3_max_live_parameters", written))
    )
    assert config.tier.max_live_numel == number
    assert type(config.tier.max_live_numel) is int


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=3))
def test_what_is_no_finite_number_is_none(value: Any) -> None:
    number = number_of(value)
    if number is not None:
        assert float("-inf") < number < float("inf")
        assert float(value) == number
    assert number_of(True) is number_of([]) is number_of("nan") is number_of("1e999") is None


@pytest.mark.parametrize(
    ("written", "means"), [("true", True), ("False", False), (1, True), (0, False)]
)
def test_booleans_may_be_words_or_numbers(written: Any, means: bool) -> None:
    config = read_deepspeed(nested("zero_optimization.overlap_comm", written))
    assert config.tier.overlap_comm is means


@pytest.mark.parametrize("value", ["3", 3.0, 3, "3.0"])
def test_a_stage_may_be_written_in_any_way(value: Any) -> None:
    assert read_deepspeed(nested("zero_optimization.stage", value)).tier.stage == 3


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "zero_optimization.offload_optimizer",
            True,
            'an object, for example {"device": "cpu"}; got true',
        ),
        ("zero_optimization.offload_optimizer", "cpu", '{"device": "cpu"}; got "cpu"'),
        ("zero_optimization.offload_param", [], 'for example {"device": "cpu"}; got []'),
        ("zero_optimization.offload_param.device", "disk", 'one of none, cpu, nvme; got "disk"'),
        ("zero_optimization.offload_param.device", "auto", "give none, cpu or nvme"),
        ("zero_optimization.offload_param.nvme_path", 3, 'for example "/local_nvme"; got 3'),
        ("zero_optimization.offload_param.nvme_path", [], "a directory"),
        ("zero_optimization.stage", 4, "must be at most 3; got 4"),
        ("zero_optimization.stage", -1, "must be at least 0; got -1"),
        ("zero_optimization.stage", True, "a whole number, for example 3; got true"),
        ("zero_optimization.stage", "auto", '"auto" cannot be known here; give 0, 1, 2 or 3'),
        ("zero_optimization.stage", 1.5, "whole number"),
        ("zero_optimization", 2, 'for example {"stage": 3}; got 2'),
        ("zero_optimization.overlap_comm", "maybe", 'must be true or false; got "maybe"'),
        ("zero_optimization.overlap_comm", 2, "must be true or false; got 2"),
        ("zero_optimization.reduce_bucket_size", "5GB", '500000000; got "5GB"'),
        ("zero_optimization.reduce_bucket_size", -1, "at least 0; got -1"),
        ("zero_optimization.leaf_module.classes", [3], 'for example ["MyExperts"]'),
        ("bf16", True, 'for example {"enabled": true}; got true'),
        ("train_batch_size", 0, "at least 1; got 0"),
        ("train_batch_size", "many", 'for example 32; got "many"'),
        ("gradient_clipping", "tight", 'must be a number, for example 1.0; got "tight"'),
        ("gradient_clipping", -0.5, "at least 0; got -0.5"),
        ("gradient_clipping", float("nan"), "must be a number"),
        ("optimizer.type", 3, 'for example "AdamW"; got 3'),
        ("aio.block_size", 1000, "4096; got 1000"),
        ("aio.block_size", 5000, "4096; got 5000"),
        ("aio.queue_depth", 4096, "1024; got 4096"),
        ("fp16.initial_scale_power", 40, ""),
    ],
)
def test_what_cannot_work_names_key_value_and_what_would(name: str, value: Any, says: str) -> None:
    config = merged(nested(name, value), {"fp16": {"enabled": True}} if name.startswith("fp16") else {})
    line = problem(config)
    assert line.startswith(f"{name}: ")
    assert says in line


@pytest.mark.parametrize(
    "name", [key.name for key in KEYS if key.name not in ("optimizer", "scheduler")]
)
def test_null_is_as_if_it_were_left_out(name: str) -> None:
    assert acting(read_deepspeed(nested(name, None))) == acting(read_deepspeed({}))


@given(
    st.sampled_from([key.name for key in KEYS]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2)
        ),
        max_leaves=4,
    ),
)
def test_any_value_is_accepted_or_a_mistake_of_its_key(name: str, value: Any) -> None:
    config = nested(name, value)
    if "auto" in json.dumps(value).lower():
        return
    try:
        read_deepspeed(config)
    except ConfigError:
        block = name.partition(".")[0]
        assert all(line.startswith(block) for line in problems(config)), problems(config)


def test_what_acts_prints_with_what_was_given() -> None:
    config = read_deepspeed(
        nested("zero_optimization", {"stage": 3, "sub_group_size": 1e14, "reduce_bucket_size": "7"})
    )
    printed = {name.rpartition(".")[2]: str(value) for name, value in config.effective.items()}
    assert printed == {
        "stage": "3",
        "sub_group_size": "4194304 (given 1e14; an upper bound)",
        "reduce_bucket_size": '7 (given "7")',
    }
    assert effective(config)["zero_optimization.reduce_bucket_size"] == 7


def test_values_are_shown_as_json_and_not_at_length() -> None:
    assert [shown(value) for value in (1e14, 5e8, 0.1, 1.0, "a", None)] == [
        "1e14", "5e8", "0.1", "1.0", '"a"', "null",
    ]  # fmt: skip
    assert len(shown(list(range(1000)))) == 60
