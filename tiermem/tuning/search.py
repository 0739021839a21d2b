"""Which setting to measure next: coarse, then around the best, then the best against the default.

[Note: search] Machines are noisy and drift, so nothing is decided by two numbers from two moments.
Candidates are measured in rounds, one run each and every second round backwards, and compared within
rounds. The default is in every round. A stage halves its field after each round by the medians so far,
until few are left; these are measured twice more. The first stage has a few settings that differ
much, the following ones the neighbours of the best so far, until that stays the same. The last stage
only repeats the finalists and the default; its rounds alone are judged (verdict.py), since a best of
many is chosen for its luck too. A round that would leave too few runs for the last stage is not begun,
and in a very short search the first stage is smaller.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tiermem.tuning.candidates import Candidate, Space
from tiermem.tuning.verdict import Round, Verdict, judge, ratios_of

_FEW = 2
"""As many rivals of the default a stage ends with."""

_MORE_ROUNDS = 2
_MAX_REFINEMENTS = 5
_FINAL_SHARE = 0.5  # of the runs, as long as that is not more than enough
_FINAL_ROUNDS = 16
_LEAST_FINAL_ROUNDS = 8
_ENOUGH_FINAL_ROUNDS = 12
_SURE_WIDTH = 0.02
_TIE = 0.01


class Search:
    """Ask for `next_round`, measure its candidates in that order, `record`, until there is none.

    Pure and deterministic: what it does depends only on what is recorded and on the runs left.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.final: list[Round] = []
        """The rounds of the last stage."""
        self.num_rounds = 0
        self._field = space.coarse()
        self._stage: list[Round] = []
        self._few_rounds = 0
        self._centre = space.default
        self._refinements = 0
        self._finalists: list[Candidate] = []
        self._is_settled = False
        self._is_final = False
        self._reserve: int | None = None

    def next_round(self, runs_left: int) -> list[Candidate]:
        """What to measure now, at most ``runs_left`` long; empty when the search has ended."""
        if self._reserve is None:
            self._reserve = min(int(runs_left * _FINAL_SHARE), _FINAL_ROUNDS * (_FEW + 1))
            self._field = self._field[: max(2, runs_left // 4)]
        if not self._is_final and (self._is_settled or runs_left - len(self._field) < self._reserve):
            self._begin_final(runs_left)
        if self._is_final and (len(self._field) > runs_left or self._is_sure()):
            return []
        return self._field[::-1] if self.num_rounds % 2 else list(self._field)

    def record(self, results: Round) -> None:
        """A whole round, as asked for."""
        self.num_rounds += 1
        if self._is_final:
            self.final.append(results)
            return
        self._stage.append(results)
        rivals = self._ranked()
        if len(rivals) > _FEW:
            kept = rivals[: max(_FEW, -(-len(rivals) // 2))]
            self._field = [self.space.default, *kept]
            return
        self._few_rounds += 1
        if self._few_rounds >= _MORE_ROUNDS:
            self._end_stage(rivals)

    def verdict(self) -> Verdict:
        """What the last stage says by now."""
        return judge(self.final, self.space.default)

    # ---- stages

    def _ranked(self) -> list[Candidate]:
        """The default's rivals in this stage's field, best first."""
        rivals = [c for c in self._field if c != self.space.default]
        return sorted(rivals, key=self._score, reverse=True)

    def _score(self, candidate: Candidate) -> float:
        ratios = ratios_of(self._stage, candidate, self.space.default)
        return statistics.median(ratios) if ratios else 0.0

    def _end_stage(self, rivals: Sequence[Candidate]) -> None:
        self._remember(rivals)
        field = [*rivals, self.space.default]
        best = max(map(self._score, field))
        centre = min((c for c in field if self._score(c) >= best - _TIE), key=lambda c: c.size)
        neighbours = self.space.neighbours(centre)
        settled = (centre == self._centre and self._refinements > 0) or not neighbours
        self._centre = centre
        self._stage, self._few_rounds = [], 0
        if settled or self._refinements == _MAX_REFINEMENTS:
            self._is_settled = True
            return
        self._refinements += 1
        self._field = list(dict.fromkeys([self.space.default, centre, *neighbours]))

    def _remember(self, rivals: Sequence[Candidate]) -> None:
        """The latest stage's are ahead of those before."""
        self._finalists = list(dict.fromkeys([*rivals[:_FEW], *self._finalists]))

    def _begin_final(self, runs_left: int) -> None:
        if self._stage:
            self._remember(self._ranked())
        rivals = list(dict.fromkeys([self._centre, *self._finalists]))
        few = max(1, min(_FEW, runs_left // _LEAST_FINAL_ROUNDS - 1))
        rivals = [c for c in rivals if c != self.space.default][:few]
        self._is_final = True
        self._field = [self.space.default, *rivals]

    def _is_sure(self) -> bool:
        if len(self.final) < _ENOUGH_FINAL_ROUNDS:
            return False
        gain = self.verdict().gain
        return gain is None or gain.width <= _SURE_WIDTH
