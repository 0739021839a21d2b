"""`CommStats`: what a communicator has moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiermem.comm.messages import Kind


@dataclass(frozen=True, slots=True)
class Traffic:
    """Exchanges of one kind, as this rank saw them; bytes are payload, counted when posted."""

    exchanges: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    max_in_flight_bytes: int = 0  # posted and not yet waited for, both directions


@dataclass(frozen=True, slots=True)
class CommStats:
    """A reading of a communicator's counters, which only grow: take two and subtract."""

    by_kind: Mapping[Kind, Traffic]  # every kind
    max_in_flight_bytes: int  # of all kinds together

    @property
    def exchanges(self) -> int:
        return sum(each.exchanges for each in self.by_kind.values())

    @property
    def sent_bytes(self) -> int:
        return sum(each.sent_bytes for each in self.by_kind.values())

    @property
    def received_bytes(self) -> int:
        return sum(each.received_bytes for each in self.by_kind.values())


class Flow:
    """Counters of one kind, or of all; the owner's lock guards them."""

    __slots__ = ("exchanges", "in_flight_bytes", "max_in_flight_bytes", "received_bytes", "sent_bytes")

    def __init__(self) -> None:
        self.exchanges = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.in_flight_bytes = 0
        self.max_in_flight_bytes = 0

    def post(self, sent_bytes: int, received_bytes: int) -> None:
        self.exchanges += 1
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self.in_flight_bytes += sent_bytes + received_bytes
        self.max_in_flight_bytes = max(self.max_in_flight_bytes, self.in_flight_bytes)

    def finish(self, nbytes: int) -> None:
        self.in_flight_bytes -= nbytes

    def reading(self) -> Traffic:
        return Traffic(self.exchanges, self.sent_bytes, self.received_bytes, self.max_in_flight_bytes)
