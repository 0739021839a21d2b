"""train = micro x accumulation x ranks: what is missing is derived, what cannot be is explained."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.config import BatchSizes
from tiermem.errors import ConfigError

SIZES = st.integers(1, 64)
GIVEN = st.none() | SIZES


@given(GIVEN, GIVEN, GIVEN, st.integers(1, 16))
def test_what_comes_out_fits_and_keeps_what_was_given(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    sizes = BatchSizes(train, micro, accumulation)
    try:
        all_set = sizes.resolve(ranks)
    except ConfigError:
        return
    assert all_set.train == all_set.micro * all_set.accumulation * ranks
    for key, value in sizes.by_key.items():
        assert value in (None, all_set.by_key[key])
    assert all_set.resolve(ranks) == all_set


@given(
    SIZES,
    SIZES,
    st.integers(1, 16),
    st.sets(st.sampled_from(["train", "micro", "accumulation"]), max_size=1),
)
def test_any_one_is_derived_from_the_other_two(
    micro: int, accumulation: int, ranks: int, missing: set[str]
) -> None:
    whole = BatchSizes(micro * accumulation * ranks, micro, accumulation)
    given_ = {
        name: None if name in missing else getattr(whole, name)
        for name in ("train", "micro", "accumulation")
    }
    assert BatchSizes(**given_).resolve(ranks) == whole


@pytest.mark.parametrize(
    ("sizes", "all_set"),
    [
        (BatchSizes(), BatchSizes(4, 1, 1)),
        (BatchSizes(train=32), BatchSizes(32, 8, 1)),
        (BatchSizes(micro=3), BatchSizes(12, 3, 1)),
        (BatchSizes(accumulation=5), BatchSizes(20, 1, 5)),
    ],
)
def test_accumulation_is_one_first_then_micro(sizes: BatchSizes, all_set: BatchSizes) -> None:
    assert sizes.resolve(4) == all_set


@given(GIVEN, GIVEN, GIVEN, st.integers(1, 16))
def test_each_remedy_alone_mends_it(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    sizes = BatchSizes(train, micro, accumulation)
    try:
        sizes.resolve(ranks)
    except ConfigError as error:
        message = str(error)
    else:
        return
    for key, value in sizes.by_key.items():
        assert f"{key} {value or 'left out'}" in message
    assert f"{ranks} rank" in message
    fixes = message.partition("mends it: ")[2].split("; ")
    assert fixes
    fields = dict(zip(sizes.by_key, ("train", "micro", "accumulation"), strict=True))
    for fix in fixes:
        if match := re.fullmatch(r"(\d+) ranks", fix):
            sizes.resolve(int(match[1]))
            continue
        key, number = fix.split(" ")
        values = {fields[k]: v for k, v in sizes.by_key.items()} | {fields[key]: int(number)}
        BatchSizes(**values).resolve(ranks)


def test_another_number_of_ranks_names_all_three() -> None:
    with pytest.raises(ConfigError) as caught:
        BatchSizes(4096, 64, 1).resolve(8)
    assert str(caught.value).endswith(
        "mends it: train_batch_size 512; train_micro_batch_size_per_gpu 512; "
        "gradient_accumulation_steps 8; 64 ranks"
    )


def test_no_ranks_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="at least 1 rank"):
        BatchSizes().resolve(0)
