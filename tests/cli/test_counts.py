"""Parameter counts are written as people write them."""

from __future__ import annotations

import pytest
import typer

from tiermem.cli.train import parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("125M", 125_000_000),
        ("1.5B", 1_500_000_000),
        ("10_000", 10_000),
        ("7b", 7 * 10**9),
        ("64k", 64_000),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "-5", "1.5X", "0", "12 34"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a count"):
        parse_count(text)
