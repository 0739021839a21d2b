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

    def upcoming(self, limit: int, *, next_pass: bool = True) -> list[int]:
        """The next distinct groups in order of use, at most ``limit``; with ``next_pass`` into the next
        pass if this one ends. Empty while nothing can be predicted."""
        if not self._recorded:
            return []
        length = len(self._recorded)
        start = len(self._current) if self._following else length
        seen: dict[int, None] = {}
        for index in range(start, start + length if next_pass else length):
            seen.setdefault(self._recorded[index % length])
            if len(seen) >= limit:
                break
        return list(seen)

    def before_next(self, group: int) -> set[int] | None:
        """The groups that are used before ``group`` is used again; None if that is not known."""
        if not self._recorded:
            return None
        start = len(self._current) if self._following else len(self._recorded)
        found: set[int] = set()
        for step in range(len(self._recorded)):
            used = self._recorded[(start + step) % len(self._recorded)]
            if used == group:
                return found
            found.add(used)
        return None

    def distance(self) -> dict[int, int]:
        """How many uses away the next use of each known group is (0: the very next)."""
        start = len(self._current) if self._following else len(self._recorded)
        length = len(self._recorded)
        result: dict[int, int] = {}
        for step in range(length):
            result.setdefault(self._recorded[(start + step) % length], step)
        return result
