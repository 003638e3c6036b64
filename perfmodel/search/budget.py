"""Work budget of a search, after which it returns the best choice so far with its gap.

Work is counted and not timed, so that a search ends at the same point on any machine under any load. The unit is an *entry*: one visited
number of a table or matrix, about 3 ns. Other work is converted by its time. Seconds count only if the user sets a time limit; then the
result depends on the machine, and reports so.
"""

from __future__ import annotations

import math
import time

from perfmodel.foundation.errors import InputError, bad_field

#: About ten minutes of work.
MOST_WORK = 2e11
_ENTRIES_PER_SECOND = 3e8
#: Fixed cost of a search call, and of each vertex and edge that is read, ordered and put into a result.
ENTRIES_OF_A_CALL = 100_000.0
ENTRIES_OF_AN_ITEM = 10_000.0
#: Cost of a label of `fronts.py`, and fixed cost of a step to the next vertex.
ENTRIES_OF_A_LABEL = 150.0
ENTRIES_OF_A_FRONT = 100_000.0


class OutOfBudget(InputError):
    """A search that ended before it found any choice: whether one exists is unknown."""


class Budget:
    """Work budget of one search, or of several that share it. `done`: entries so far; `most`: the limit."""

    __slots__ = ("deadline", "done", "most", "parent")

    def __init__(self, most: float = MOST_WORK, *, time_limit: float = math.inf) -> None:
        """time_limit: the user's limit, from now  [s]"""
        for field, value in (("work_limit", most), ("time_limit", time_limit)):
            if not value > 0:
                raise bad_field(field, value, "must be positive", "use inf for none")
        self.most, self.done = most, 0.0
        self.deadline = math.inf if math.isinf(time_limit) else time.monotonic() + time_limit
        self.parent: Budget | None = None

    def part(self, most: float, *, least_time: float = 0.0) -> Budget:
        """Return the budget of a part of the search, which also counts here. Past the time limit the part still has `least_time`. [s]"""
        part = Budget(most)
        part.parent = self
        if math.isfinite(self.deadline):
            part.deadline = max(self.deadline, time.monotonic() + least_time)
        return part

    def spend(self, work: float) -> None:
        self.done += work
        if self.parent is not None:
            self.parent.spend(work)

    @property
    def is_late(self) -> bool:
        """Whether the user's time limit is over; without a limit the clock is not read."""
        return math.isfinite(self.deadline) and time.monotonic() >= self.deadline

    @property
    def is_spent(self) -> bool:
        return self.done >= self.most or self.is_late

    @property
    def left(self) -> float:
        """Remaining entries."""
        entries = max(0.0, self.most - self.done)
        if math.isinf(self.deadline):
            return entries
        return min(entries, max(0.0, self.deadline - time.monotonic()) * _ENTRIES_PER_SECOND)

    @property
    def spent(self) -> str:
        """The limit that has run out: `work limit`, `time limit`, or an empty string."""
        return "work limit" if self.done >= self.most else "time limit" if self.is_late else ""

    def ran_out(self, what: str) -> OutOfBudget:
        field = (self.spent or "work limit").replace(" ", "_")
        return OutOfBudget(f"{field}: {what} was found before it ran out; give more, or a smaller problem")
