"""Plans of a search as flat rows, for `--csv` and data frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfmodel.parallel.rows import prediction_row

if TYPE_CHECKING:
    from perfmodel.parallel.interval import StepInterval
    from perfmodel.parallel.plan import Plan
    from perfmodel.planner.result import SearchResult


def search_rows(
    result: SearchResult, *, tokens: float = 0.0, interval_of: Callable[[Plan], StepInterval] | None = None
) -> list[dict[str, Any]]:
    """Return a row per plan, best first, then one per baseline; `place` is the position of the plan or the name of the baseline."""
    named = [(str(position), prediction) for position, prediction in zip(result.ranking.places, result.plans, strict=True)]
    values = dict(enumerate(result.ranking.values))
    named += [(baseline.name, prediction) for baseline in result.baselines for prediction in baseline.prediction]
    return [
        {"place": label}
        | ({"objective_value": values.get(number)} if values else {})
        | prediction_row(prediction, tokens=tokens, interval=interval_of(prediction.plan) if interval_of else None)
        for number, (label, prediction) in enumerate(named)
    ]
