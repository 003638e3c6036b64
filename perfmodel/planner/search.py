"""Search of a space of plans: the protocol that every space implements, and the one driver of a search."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from perfmodel.foundation.errors import InputError
from perfmodel.planner.result import Baseline, SearchResult

RowsT = TypeVar("RowsT")
ResultT = TypeVar("ResultT", bound=SearchResult[Any, Any, Any, Any])


class PlanSpace(Protocol[RowsT, ResultT]):
    """Space of plans of one job on one cluster: RowsT are its evaluated plans, ResultT is the result of its search."""

    @property
    def also(self) -> Collection[str]:
        """Parts of the result in addition to the ranked plans: baselines, front, and what the space itself adds."""

    def evaluate(self, top: int) -> RowsT:
        """Evaluate every plan, as columns; the `top` best are ranked later."""

    def ranked(self, rows: RowsT, top: int) -> ResultT:
        """Return the best plans, the conditions, and the numbers of the others by reason, without front and baselines."""

    def front(self, rows: RowsT) -> tuple[Any, ...]:
        """Return the Pareto front, in points of the result's kind."""

    def baselines(self, result: ResultT) -> tuple[Baseline[Any], ...]:
        """Return the usual plans without a search, compared with the ranked plans."""


def search(space: PlanSpace[RowsT, ResultT], *, top: int = 10) -> ResultT:
    """Evaluate and rank the plans of a space, with the reasons of the others."""
    if top < 1:
        raise InputError(f"top={top}: must be at least 1; ask for the ten best with 10")
    begin = time.process_time()
    rows = space.evaluate(top)
    search_time = time.process_time() - begin
    result = space.ranked(rows, top)
    return replace(
        result,
        rejected={reason: count for reason, count in result.rejected.items() if count},
        search_time=search_time,
        pareto=space.front(rows) if "front" in space.also else (),
        baselines=space.baselines(result) if "baselines" in space.also else (),
    )
