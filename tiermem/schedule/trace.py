"""The use trace: in which order groups are used, recorded once and verified afterwards. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class UseTrace:
    """The order of group uses in one pass (a forward, with its backward if there is one).

    A pass begins at each outermost forward. While the uses agree with the recorded order,
    `upcoming` gives what comes next; at the first difference the rest of the pass is recorded
    afresh and nothing is predicted. Owned by the training thread.
    """

    _recorded: list[int] = field(default_factory=list)
    _current: list[int] = field(default_factory=list)
    _following: bool = False
    mismatches: int = 0

    def begin(self) -> None:
        """A new pass: what was seen in the last one becomes the prediction."""
        if self._current:
            self._recorded = self._current
        self._current = []
        self._following = bool(self._recorded)

    def use(self, group: int) -> None:
        """Group ``group`` is used now."""
        position = len(self._current)
        self._current.append(group)
        if self._following and (position >= len(self._recorded) or self._recorded[position] != group):
            self._following = False
            self.mismatches += 1

    @property
    def following(self) -> bool:
        return self._following

    def upcoming(self, limit: int) -> list[int]:
        """The next distinct groups in order of use, into the next pass if this one ends; at most
        ``limit``. Empty while nothing can be predicted."""
        if not self._recorded:
            return []
        start = len(self._current) if self._following else len(self._recorded)
        seen: dict[int, None] = {}
        for index in range(start, start + len(self._recorded)):
            seen.setdefault(self._recorded[index % len(self._recorded)])
            if len(seen) >= limit:
                break
        return list(seen)

    def distance(self) -> dict[int, int]:
        """How many uses away the next use of each known group is (0: the very next)."""
        start = len(self._current) if self._following else len(self._recorded)
        length = len(self._recorded)
        result: dict[int, int] = {}
        for step in range(length):
            result.setdefault(self._recorded[(start + step) % length], step)
        return result
