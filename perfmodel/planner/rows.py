"""Plans of a search as flat rows, for `--csv` and data frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.plain import picked
from perfmodel.parallel.rows import interval_bounds, prediction_row, serving_row

if TYPE_CHECKING:
    from perfmodel.parallel.interval import StepInterval
    from perfmodel.parallel.plan import Plan
    from perfmodel.planner.result import RankedPlan, ServingSearch, TrainingSearch


def training_rows(
    result: TrainingSearch, *, tokens: float = 0.0, interval_of: Callable[[Plan], StepInterval] | None = None
) -> list[dict[str, Any]]:
    """Return a row per plan, best first, then one per baseline; `place` is the position of the plan or the name of the baseline."""
    named = [(str(position), prediction) for position, prediction in zip(result.ranking.places, result.plans, strict=True)]
    values = dict(enumerate(result.ranking.values))
    named += [(baseline.name, prediction) for baseline in result.baselines for prediction in baseline.plans]
    return [
        {"place": label}
        | ({"objective_value": values.get(number)} if values else {})
        | prediction_row(prediction, tokens=tokens, interval=interval_of(prediction.plan) if interval_of else None)
        for number, (label, prediction) in enumerate(named)
    ]


def service_rows(result: ServingSearch) -> list[dict[str, Any]]:
    """Return a row per plan of a service, best first, then one per plan of two pools."""
    alone = zip(result.ranking.places, result.plans, strict=True)
    rows = [ranked_row(ranked, position) for position, ranked in alone if ranked.plan.pools is None]
    return rows + [ranked_row(ranked, position) for position, ranked in enumerate(result.disaggregated, 1)]


def ranked_row(ranked: RankedPlan, position: int) -> dict[str, Any]:
    """Return a row of a plan of a service, with figures over all given chips, idle ones included."""
    kind = "aggregated" if ranked.plan.pools is None else "disaggregated"
    return {"place": position, "kind": kind} | serving_row(ranked.prediction) | interval_bounds(ranked.intervals) | {
        "chips": ranked.plan.num_chips + ranked.idle_chips,
        **picked(ranked, "idle_chips tokens_per_second_per_chip"),
        "cost_per_million_tokens": ranked.cost_per_million,
        **picked(ranked, "meets reason"),
    }  # fmt: skip
