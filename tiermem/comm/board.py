"""`Board`: what ranks tell each other through the group's store, beside their exchanges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiermem.comm.compat import Store
from tiermem.comm.deadlock import State
from tiermem.comm.messages import Kind, Message, Transfer


@dataclass(frozen=True, slots=True)
class Departure:
    """How a rank left: ``how`` is ``closed``, ``failed`` or ``ended`` (its process, without close)."""

    how: str
    said: str  # its error's text, where there is one
    exchanges: int
    last: str  # the name of its last exchange


class Board:
    """Each rank writes its own keys only. Nothing here waits, and nothing raises when the store is
    gone (it dies with the process that hosts it): then there is nothing to read."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._said_seen = False  # written by the watch, after its end by who closes

    def arrive(self) -> None:
        """Says that this rank is here, to open its communicator."""
        self._write(f"here/{self._rank}", True)

    def withdraw(self) -> None:
        """Says that this rank waits here no more."""
        self._write(f"here/{self._rank}", False)

    def is_here(self, rank: int) -> bool:
        return bool(self._read(f"here/{rank}"))

    def call_complete(self) -> None:
        """Says that all ranks are here."""
        self._write("complete", True)

    def is_complete(self) -> bool:
        return bool(self._read("complete"))

    def refuse(self, text: str) -> None:
        """Says why this rank will not open what others may wait to open with it."""
        self._write(f"refused/{self._rank}", text)

    def refusal(self, rank: int) -> str | None:
        text = self._read(f"refused/{rank}")
        return None if text is None else str(text)

    def leave(self, departure: Departure) -> None:
        """Says that this rank has left, before its connections close."""
        words = [departure.how, departure.said, departure.exchanges, departure.last]
        if self._write(f"left/{self._rank}", words):
            self._count("left")

    def departure(self, rank: int) -> Departure | None:
        """How ``rank`` left, if it has said so."""
        words = self._read(f"left/{rank}")
        return None if words is None else Departure(*words)

    def num_left(self) -> int | None:
        """How many ranks have said that they leave; None if the store is gone."""
        return self._count("left", 0)

    def fail(self, text: str) -> None:
        """Says who ended the run and why. The first to say so is the one who is believed."""
        place = self._count("failures")
        if place is not None:
            self._write(f"failure/{place}", text)

    def failure(self) -> str | None:
        """What was said first about why the run is over."""
        text = self._read("failure/1")
        return None if text is None else str(text)

    def need_nobody(self) -> None:
        """Says that this rank knows of the failure and waits for nobody, or has left: once."""
        if not self._said_seen:
            self._said_seen = True
            self._count("seen")

    def num_seen(self) -> int | None:
        """How many ranks know of the failure and wait for nobody, or have left; None if the store is
        gone."""
        return self._count("seen", 0)

    def publish_state(self, state: State | None) -> None:
        """Says that this rank is stuck, or no longer."""
        self._write(f"state/{self._rank}", None if state is None else _state_to_words(state))

    def state(self, rank: int) -> State | None:
        """The state of ``rank``, if it is stuck."""
        words = self._read(f"state/{rank}")
        return None if words is None else _state_from_words(words)

    def ask_release(self, waits: list[Transfer]) -> None:
        """Asks the others to end these blocked transfers of this rank, which knows of the failure."""
        self._write(f"release/{self._rank}", [_transfer_to_words(each) for each in waits])

    def asked_release(self, rank: int) -> list[Transfer]:
        """The transfers that ``rank`` asks to be ended."""
        return [_transfer_from_words(each) for each in self._read(f"release/{rank}") or []]

    def _write(self, key: str, words: Any) -> bool:
        try:
            self._store.set(key, json.dumps(words))
        except RuntimeError:  # all errors of stores, network errors too
            return False
        return True

    def _read(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            return None

    def _count(self, key: str, more: int = 1) -> int | None:
        try:
            return self._store.add(key, more)
        except RuntimeError:
            return None


def _transfer_to_words(transfer: Transfer) -> list[Any]:
    what = transfer.what
    return [
        [what.kind.name, what.index, what.name, what.turn],
        transfer.number,
        transfer.peer,
        transfer.sending,
        transfer.nbytes,
    ]


def _transfer_from_words(words: list[Any]) -> Transfer:
    kind, index, name, turn = words[0]
    return Transfer(Message(Kind[kind], index, name, turn), *words[1:])


def _state_to_words(state: State) -> Mapping[str, Any]:
    return {
        "stamp": state.stamp,
        "beat": state.beat,
        "waits": [_transfer_to_words(each) for each in state.waits],
        "posted": [[kind.name, index, count] for (kind, index), count in state.posted.items()],
        "open": [_transfer_to_words(each) for each in state.open],
    }


def _state_from_words(words: Mapping[str, Any]) -> State:
    return State(
        stamp=words["stamp"],
        beat=words["beat"],
        waits=tuple(_transfer_from_words(each) for each in words["waits"]),
        posted={(Kind[kind], index): count for kind, index, count in words["posted"]},
        open=tuple(_transfer_from_words(each) for each in words["open"]),
    )
