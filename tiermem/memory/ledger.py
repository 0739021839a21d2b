"""`Ledger`: every byte of every tier, by purpose, against the tier's budget."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from tiermem.errors import BudgetError, StateError
from tiermem.types import Purpose, Tier, format_bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes in use now and at the most."""

    used_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One tier at one moment. ``by_purpose`` has the purposes that were ever used."""

    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    by_purpose: Mapping[Purpose, Usage]

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger at one moment. ``locked_bytes`` is memory that cannot be swapped out."""

    tiers: Mapping[Tier, TierUsage]
    locked_bytes: int


@dataclass(slots=True)
class _Account:
    used: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def usage(self) -> Usage:
        return Usage(self.used, self.peak)


@dataclass(slots=True)
class _TierAccount:
    budget: int
    total: _Account = field(default_factory=_Account)
    purposes: dict[Purpose, _Account] = field(default_factory=dict)


class Ledger:
    """Counts reservations; holds no memory itself. Safe to call from any thread.

    ``tier_budgets`` are bytes. A tier that is not named has a budget of 0.
    """

    def __init__(self, tier_budgets: Mapping[Tier, int]) -> None:
        for tier, budget in tier_budgets.items():
            if budget < 0:
                raise BudgetError(f"the {tier.value} budget is {budget} bytes; give 0 or more")
        self._lock = threading.Lock()
        self._tiers = {tier: _TierAccount(tier_budgets.get(tier, 0)) for tier in Tier}
        self._locked = 0

    def reserve(self, tier: Tier, purpose: Purpose, nbytes: int) -> None:
        """Counts ``nbytes`` as used. Raises `BudgetError`, and counts nothing, if over budget."""
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes")
        with self._lock:
            account = self._tiers[tier]
            if account.total.used + nbytes > account.budget:
                raise BudgetError(self._over(tier, purpose, nbytes))
            account.total.add(nbytes)
            account.purposes.setdefault(purpose, _Account()).add(nbytes)

    def release(self, tier: Tier, purpose: Purpose, nbytes: int) -> None:
        """Takes back a reservation. Raises `StateError` if more is released than reserved."""
        with self._lock:
            account = self._tiers[tier]
            held = account.purposes.get(purpose)
            if nbytes < 0 or held is None or held.used < nbytes:
                raise StateError(
                    f"released {nbytes} bytes of {tier.value}/{purpose.value}, of which "
                    f"{held.used if held else 0} are reserved; release once what was reserved once"
                )
            held.used -= nbytes
            account.total.used -= nbytes

    def add_locked(self, delta_bytes: int) -> None:
        """Memory was locked (or, negative, unlocked) against swapping."""
        with self._lock:
            self._locked += delta_bytes

    def snapshot(self) -> LedgerSnapshot:
        """A consistent copy of everything."""
        with self._lock:
            tiers = {
                tier: TierUsage(
                    account.budget,
                    account.total.used,
                    account.total.peak,
                    {purpose: held.usage() for purpose, held in account.purposes.items()},
                )
                for tier, account in self._tiers.items()
            }
            return LedgerSnapshot(tiers, self._locked)

    def _over(self, tier: Tier, purpose: Purpose, nbytes: int) -> str:
        account = self._tiers[tier]
        holders = ", ".join(
            f"{held_by.value} {format_bytes(held.used)}"
            for held_by, held in account.purposes.items()
            if held.used
        )
        return (
            f"{nbytes} bytes ({format_bytes(nbytes)}) of {tier.value} memory for {purpose.value} do "
            f"not fit: {format_bytes(account.total.used)} of the budget of {account.budget} bytes "
            f"({format_bytes(account.budget)}) are in use ({holders or 'by nothing'}); raise the "
            f"budget to at least {account.total.used + nbytes} bytes or keep less in this tier"
        )
