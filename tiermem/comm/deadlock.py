"""Whether ranks wait for each other for ever, from what each of them says of itself.

[Note: disagreement] Ranks that run different things next wait for messages that nobody will send, and
gloo would let them. They are found out without ever accusing a rank that is only slow:

- A rank is *stuck* when every living thread of it that has ever posted an exchange is blocked in
  the wait of one transfer. A thread that computes may post next what others wait for, so a rank with
  such a thread is not stuck, however long it takes. (A rank one of whose threads once posted and now
  sleeps elsewhere is therefore never accused; then only the warning after a minute speaks.)
- A blocked thread can go on if the peer has posted the other end of its transfer, which is known
  from the peer's counts of exchanges posted of each message, or if the peer is not stuck. A peer that
  is ahead or behind is of no interest: only whether somebody can go on.
- The *deadlocked* ranks are what is left of the stuck ones after taking away, again and again, each
  rank of which some thread can go on. Every thread of theirs waits for a deadlocked rank that has
  not posted the other end and cannot.
- A rank that has closed posts nothing any more: it is like a stuck one that waits for nobody.
- Where the peer has posted the exchange, but nothing in it for this rank or in another size, the other
  end does not count as posted: the two never meet, since the size is part of the tag. (What an
  exchange consisted of is forgotten when all of it is complete; then it counts as posted.)

What ranks say is read at different times. Each state therefore carries a `stamp`, which grows
with every post, wait and completion of that rank, and a `beat`, which grows with every look that
finds the stamp unchanged. A set of deadlocked ranks with their stamps is believed when a second look
finds the same, and a later one the same again with every beat grown by two since the second: the last
of these was taken after the first look had ended, so at that moment all of them were in these states
at once. A rank that has closed does not change, and needs no beat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiermem.comm.messages import Kind, Transfer


@dataclass(frozen=True, slots=True)
class State:
    """A stuck rank, or one that has closed; see [Note: disagreement]."""

    stamp: int
    beat: int
    waits: tuple[Transfer, ...]  # one for each thread; none: it has closed
    posted: Mapping[tuple[Kind, int], int]  # number of exchanges, of each message
    open: tuple[Transfer, ...]  # of all exchanges that are not known to be complete


def _same_exchange(state: State, wait: Transfer) -> list[Transfer]:
    """What ``state`` has in the exchange of ``wait``; nothing if it is complete or not posted."""
    key = (wait.what.kind, wait.what.index, wait.number)
    return [each for each in state.open if (each.what.kind, each.what.index, each.number) == key]


def _other_ends(transfers: list[Transfer], rank: int, wait: Transfer) -> list[Transfer]:
    """The transfer that belongs to ``wait`` of ``rank``, whatever its size; or nothing."""
    return [each for each in transfers if each.peer == rank and each.sending != wait.sending]


def _can_go_on(wait: Transfer, rank: int, states: Mapping[int, State]) -> bool:
    peer = states.get(wait.peer)
    if peer is None:
        return True
    if wait.number >= peer.posted.get((wait.what.kind, wait.what.index), 0):
        return False
    transfers = _same_exchange(peer, wait)
    others = _other_ends(transfers, rank, wait)
    return not transfers or any(other.nbytes == wait.nbytes for other in others)


def deadlocked(states: Mapping[int, State]) -> frozenset[int]:
    """The ranks of ``states`` that wait for ever, and those that have closed."""
    left = dict(states)
    while True:
        free = [
            rank
            for rank, state in left.items()
            if any(_can_go_on(wait, rank, left) for wait in state.waits)
        ]
        if not free:
            return frozenset(left)
        for rank in free:
            del left[rank]


def follow(states: Mapping[int, State], rank: int) -> list[int]:
    """From deadlocked ``rank`` to the one that it waits for, and so on: a circle of ranks, or the two
    at the end of the way if that is a rank that has closed."""
    path = [rank]
    while True:
        peer = states[path[-1]].waits[0].peer
        if not states[peer].waits:
            return [path[-1], peer]
        if peer in path:
            return path[path.index(peer) :]
        path.append(peer)


def describe(states: Mapping[int, State], ranks: Sequence[int], names: Mapping[int, str]) -> str:
    """What each of ``ranks`` waits for and from whom; rank r is called ``names[r]``."""
    clauses = []
    for rank in ranks:
        wait = states[rank].waits[0]
        clause = f"{names[rank]} {describe_wait(wait, names[wait.peer])}"
        others = _other_ends(_same_exchange(states[wait.peer], wait), rank, wait)
        for other in others:
            verb = "sends" if other.sending else "expects"
            clause += f", which {verb} {other.nbytes} bytes and not {wait.nbytes}"
        clauses.append(clause)
    return ", while ".join(clauses)


def describe_wait(wait: Transfer, peer: str) -> str:
    """``waits for ...``, for messages."""
    what = f"{wait.what} (exchange {wait.number} of it)"
    if wait.sending:
        return f"waits for {peer} to take {what}"
    return f"waits for {what} from {peer}"


class Suspicion:
    """Believes in a deadlock as [Note: disagreement] says. One thread."""

    def __init__(self) -> None:
        self._suspect: frozenset[tuple[int, int]] = frozenset()
        self._beats: dict[int, int] | None = None

    def look(self, states: Mapping[int, State]) -> frozenset[int]:
        """The ranks that are certainly deadlocked, given the states as they are now."""
        ranks = deadlocked(states)
        suspect = frozenset((rank, states[rank].stamp) for rank in ranks)
        if suspect != self._suspect:
            self._suspect = suspect
            self._beats = None
            return frozenset()
        if self._beats is None:
            self._beats = {rank: states[rank].beat for rank in ranks}
            return frozenset()
        for rank, beat in self._beats.items():
            if states[rank].waits and states[rank].beat < beat + 2:
                return frozenset()
        return ranks
