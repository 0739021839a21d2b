"""A record's residency moves only along the documented ways."""

from __future__ import annotations

import itertools

import pytest

from tiermem.errors import ConfigError, StateError
from tiermem.store.records import Record, RecordSpec, Residency, transition
from tiermem.types import Field, Tier

ABSENT, NVME, READING, HOST, WRITING = (
    Residency.ABSENT,
    Residency.NVME,
    Residency.READING,
    Residency.HOST,
    Residency.WRITING,
)
LEGAL = {
    (ABSENT, WRITING),
    (ABSENT, HOST),
    (NVME, READING),
    (NVME, WRITING),
    (HOST, READING),
    (HOST, WRITING),
    (READING, NVME),
    (READING, HOST),
    (READING, WRITING),
    (WRITING, NVME),
    (WRITING, HOST),
    (WRITING, READING),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Residency, Residency)))
def test_transitions(before: Residency, after: Residency) -> None:
    record = Record(RecordSpec("layer.0", Field.PARAM, 100, Tier.NVME), 0, None, None, ())
    record.residency = before
    if before is after or (before, after) in LEGAL:
        transition(record, after)
        assert record.residency is after
    else:
        with pytest.raises(StateError, match=rf"layer.0/param .*{before.value} to {after.value}"):
            transition(record, after)
        assert record.residency is before


def test_specs_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="0 bytes"):
        RecordSpec("w", Field.PARAM, 0, Tier.HOST)
    with pytest.raises(ConfigError, match="device"):
        RecordSpec("w", Field.PARAM, 1, Tier.DEVICE)
    with pytest.raises(ConfigError, match=r"1\.5"):
        RecordSpec("w", Field.PARAM, 1, Tier.NVME, 1.5)
