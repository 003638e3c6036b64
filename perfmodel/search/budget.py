"""How much a search may do before it ends with the best so far and its gap.

Work is counted and not timed, so that the same search ends at the same place on any machine, however loaded. The unit is an *entry*: a
number of a table or matrix looked at, about 3 ns. Other work counts as as many entries as take its time. Seconds count only where the
user of a search asked for them; then what is found depends on the machine, and the result says so.
"""

from __future__ import annotations

import math
import time

from perfmodel.foundation.errors import InputError, bad_field

#: About ten minutes.
MOST_WORK = 2e11
_ENTRIES_PER_SECOND = 3e8
#: A call of a search, and each of its vertices and edges that is read, ordered and put into a result.
ENTRIES_OF_A_CALL = 100_000.0
ENTRIES_OF_AN_ITEM = 10_000.0
#: A label of `fronts.py`, and a step to the next vertex whatever its labels.
ENTRIES_OF_A_LABEL = 150.0
ENTRIES_OF_A_FRONT = 100_000.0


class OutOfBudget(InputError):
    """A search that had to end before it found anything: whether there is something is not known."""


class Budget:
    """Work budget of one search, or of several that share it. `done`: entries so far; `most`: the limit."""

    __slots__ = ("deadline", "done", "most", "whole")

    def __init__(self, most: float = MOST_WORK, *, time_limit: float = math.inf) -> None:
        """time_limit: the user's own, from now  [s]"""
        for field, value in (("work_limit", most), ("time_limit", time_limit)):
            if not value > 0:
                raise bad_field(field, value, "must be positive", "use inf for none")
        self.most, self.done = most, 0.0
        self.deadline = math.inf if math.isinf(time_limit) else time.monotonic() + time_limit
        self.whole: Budget | None = None

    def part(self, most: float, *, least_time: float = 0.0) -> Budget:
        """A budget of its own for a piece of the search, whose work counts here too. After the user's time it has `least_time` yet. [s]"""
        found = Budget(most)
        found.whole = self
        if math.isfinite(self.deadline):
            found.deadline = max(self.deadline, time.monotonic() + least_time)
        return found

    def spend(self, work: float) -> None:
        self.done += work
        if self.whole is not None:
            self.whole.spend(work)

    @property
    def is_late(self) -> bool:
        """The user's time is over; the clock is not looked at where none was given."""
        return math.isfinite(self.deadline) and time.monotonic() >= self.deadline

    @property
    def is_spent(self) -> bool:
        return self.done >= self.most or self.is_late

    @property
    def left(self) -> float:
        """Entries."""
        own = max(0.0, self.most - self.done)
        if math.isinf(self.deadline):
            return own
        return min(own, max(0.0, self.deadline - time.monotonic()) * _ENTRIES_PER_SECOND)

    @property
    def spent(self) -> str:
        """Which of the two has run out: `work limit`, `time limit`, or nothing."""
        return "work limit" if self.done >= self.most else "time limit" if self.is_late else ""

    def ran_out(self, what: str) -> OutOfBudget:
        field = (self.spent or "work limit").replace(" ", "_")
        return OutOfBudget(f"{field}: {what} was found before it ran out; give more, or a smaller problem")
