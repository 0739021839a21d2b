"""The rule that tells a deadlock from ranks that are slow, on random programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from tiermem.comm.deadlock import State, Suspicion, deadlocked, describe, follow
from tiermem.comm.messages import Kind, Message, Transfer

NAMES = {rank: f"rank {rank}" for rank in range(4)}


@dataclass
class _Rank:
    """One thread of one rank: ``program`` is a list of messages, each with the peers to send to, those
    to receive from, and whether it waits at once."""

    program: list[tuple[int, frozenset[int], frozenset[int], bool]]
    step: int = 0
    posted: dict[int, int] = field(default_factory=dict)
    sent: set[tuple[int, int, int]] = field(default_factory=set)  # message, number, peer
    taken: set[tuple[int, int, int]] = field(default_factory=set)
    waits: list[Transfer] = field(default_factory=list)


def _post(rank: _Rank) -> None:
    index, sends, receives, waits = rank.program[rank.step]
    rank.step += 1
    number = rank.posted.get(index, 0)
    rank.posted[index] = number + 1
    rank.sent |= {(index, number, peer) for peer in sends}
    rank.taken |= {(index, number, peer) for peer in receives}
    if waits:
        what = Message(Kind.PARAMS, index, f"m.{index}")
        rank.waits = [Transfer(what, number, peer, False, 8) for peer in sorted(receives)]
        rank.waits += [Transfer(what, number, peer, True, 8) for peer in sorted(sends)]


def _met(ranks: Sequence[_Rank], own: int, wait: Transfer) -> bool:
    peer = ranks[wait.peer]
    there = peer.taken if wait.sending else peer.sent
    return (wait.what.index, wait.number, own) in there


def _advance(ranks: Sequence[_Rank], own: int) -> bool:
    """One step of a rank; False if it is blocked or at its end."""
    rank = ranks[own]
    if rank.waits:
        if not _met(ranks, own, rank.waits[0]):
            return False
        rank.waits.pop(0)
        return True
    if rank.step == len(rank.program):
        return False
    _post(rank)
    return True


def _states(ranks: Sequence[_Rank]) -> dict[int, State]:
    """What stuck ranks would say. Ranks at the end of their program have closed."""
    states = {}
    for own, rank in enumerate(ranks):
        ended = rank.step == len(rank.program) and not rank.waits
        if not rank.waits and not ended:
            continue
        posted = {(Kind.PARAMS, index): count for index, count in rank.posted.items()}
        open_ones = [
            Transfer(Message(Kind.PARAMS, index, ""), number, peer, sending, 8)
            for sending, those in ((True, rank.sent), (False, rank.taken))
            for index, number, peer in those
        ]
        states[own] = State(0, 0, tuple(rank.waits[:1]), posted, tuple(open_ones))
    return states


def _programs(
    size: int,
) -> st.SearchStrategy[list[list[tuple[int, frozenset[int], frozenset[int], bool]]]]:
    def program(own: int) -> st.SearchStrategy[list[tuple[int, frozenset[int], frozenset[int], bool]]]:
        peers = st.frozensets(st.sampled_from([r for r in range(size) if r != own]), min_size=1)
        step = st.tuples(st.integers(0, 2), peers, peers, st.booleans())
        return st.lists(step, max_size=5)

    return st.tuples(*(program(own) for own in range(size))).map(list)


@given(st.data(), st.integers(2, 4))
def test_deadlocked_are_exactly_those_that_never_go_on(data: st.DataObject, size: int) -> None:
    ranks = [_Rank(program) for program in data.draw(_programs(size))]
    accused: set[int] = set()
    order = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    for own in order:
        stuck = {r: ranks[r].step for r in accused}
        _advance(ranks, own)
        assert {r: ranks[r].step for r in accused} == stuck  # who was accused has not moved
        states = _states(ranks)
        accused = {r for r in deadlocked(states) if states[r].waits}
    while sum(_advance(ranks, own) for own in range(size)):  # all of them, not only the first
        assert not any(ranks[r].waits and _met(ranks, r, ranks[r].waits[0]) for r in accused)
    states = _states(ranks)
    final = {r for r in deadlocked(states) if states[r].waits}
    assert accused <= final
    assert final == {own for own, rank in enumerate(ranks) if rank.waits}
    for rank in final:
        way = follow(states, rank)
        assert way
        named = way if states[way[-1]].waits else way[:-1]
        assert "waits for" in describe(states, named, NAMES)


def _wait(peer: int, index: int, nbytes: int = 8, sending: bool = False) -> Transfer:
    return Transfer(Message(Kind.PARAMS, index, f"m.{index}"), 0, peer, sending, nbytes)


def test_one_free_thread_is_enough() -> None:
    posted = {(Kind.PARAMS, 3): 1}
    first = State(1, 0, (_wait(1, 0), _wait(1, 3)), {}, ())
    second = State(1, 0, (_wait(0, 1),), posted, (_wait(0, 3, sending=True),))
    assert deadlocked({0: first, 1: second}) == frozenset()
    assert deadlocked({0: replace(first, waits=(_wait(1, 0), _wait(1, 4))), 1: second}) == {0, 1}


def test_other_sizes_never_meet() -> None:
    posted = {(Kind.PARAMS, 0): 1}
    for nbytes, expected in ((8, frozenset()), (12, {0, 1})):
        first = State(1, 0, (_wait(1, 0),), posted, (_wait(1, 0), _wait(1, 0, sending=True)))
        ends = (_wait(0, 0, nbytes), _wait(0, 0, nbytes, sending=True))
        second = State(1, 0, (_wait(0, 0, nbytes),), posted, ends)
        assert deadlocked({0: first, 1: second}) == expected
        if expected:
            assert "sends 12 bytes and not 8" in describe({0: first, 1: second}, [0, 1], NAMES)


def _two(stamp: int, beats: tuple[int, int]) -> dict[int, State]:
    return {
        0: State(stamp, beats[0], (_wait(1, 0),), {}, ()),
        1: State(stamp, beats[1], (_wait(0, 1),), {}, ()),
    }


def test_belief_needs_the_same_states_over_time() -> None:
    suspicion = Suspicion()
    assert not suspicion.look(_two(1, (0, 0)))
    assert not suspicion.look(_two(1, (1, 5)))
    assert not suspicion.look(_two(1, (3, 6)))  # the second's state may be old
    assert suspicion.look(_two(1, (3, 7))) == {0, 1}
    assert not suspicion.look(_two(2, (4, 8)))  # something has happened
    assert not suspicion.look(_two(2, (9, 9)))
    assert not suspicion.look({0: _two(2, (12, 12))[0]})  # one computes again
    assert not suspicion.look(_two(2, (14, 14)))
    assert not suspicion.look(_two(2, (15, 15)))
    assert suspicion.look(_two(2, (17, 17))) == {0, 1}
