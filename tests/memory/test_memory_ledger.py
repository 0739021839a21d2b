"""The ledger counts every byte and refuses what is over budget."""

from __future__ import annotations

import threading

import pytest

from tiermem.errors import BudgetError, StateError
from tiermem.memory.ledger import Ledger
from tiermem.types import Purpose, Tier


def test_counts_by_tier_and_purpose_with_peaks() -> None:
    ledger = Ledger({Tier.HOST: 1000, Tier.DEVICE: 500})
    ledger.reserve(Tier.HOST, Purpose.GATHER, 300)
    ledger.reserve(Tier.HOST, Purpose.OPTIMIZER, 500)
    ledger.release(Tier.HOST, Purpose.OPTIMIZER, 400)
    ledger.reserve(Tier.DEVICE, Purpose.GATHER, 500)
    snapshot = ledger.snapshot()
    host = snapshot.tiers[Tier.HOST]
    assert (host.used_bytes, host.peak_bytes, host.budget_bytes, host.free_bytes) == (
        400,
        800,
        1000,
        600,
    )
    assert host.by_purpose[Purpose.OPTIMIZER].used_bytes == 100
    assert host.by_purpose[Purpose.OPTIMIZER].peak_bytes == 500
    assert snapshot.tiers[Tier.DEVICE].free_bytes == 0


def test_over_budget_is_refused_with_value_limit_and_remedy_and_counts_nothing() -> None:
    ledger = Ledger({Tier.HOST: 1000})
    ledger.reserve(Tier.HOST, Purpose.GATHER, 600)
    with pytest.raises(BudgetError, match=r"401 bytes.*budget of 1000 bytes.*gather.*raise.*1001"):
        ledger.reserve(Tier.HOST, Purpose.OPTIMIZER, 401)
    ledger.reserve(Tier.HOST, Purpose.OPTIMIZER, 400)
    with pytest.raises(BudgetError, match="nvme"):
        ledger.reserve(Tier.NVME, Purpose.RESIDENT, 1)


def test_releasing_what_is_not_reserved_is_an_error() -> None:
    ledger = Ledger({Tier.HOST: 1000})
    ledger.reserve(Tier.HOST, Purpose.GATHER, 10)
    with pytest.raises(StateError, match="11 bytes of host/gather"):
        ledger.release(Tier.HOST, Purpose.GATHER, 11)
    with pytest.raises(StateError):
        ledger.release(Tier.HOST, Purpose.OPTIMIZER, 1)


def test_negative_budget_is_refused() -> None:
    with pytest.raises(BudgetError, match="-1"):
        Ledger({Tier.HOST: -1})


def test_threads_lose_no_count() -> None:
    ledger = Ledger({Tier.HOST: 1 << 40})

    def work() -> None:
        for _ in range(2000):
            ledger.reserve(Tier.HOST, Purpose.GATHER, 3)
            ledger.release(Tier.HOST, Purpose.GATHER, 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.snapshot().tiers[Tier.HOST].used_bytes == 8000
