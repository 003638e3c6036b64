"""Serving predictions as flat rows (SI units, `--json` names) and as one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_time
from perfmodel.hardware.cluster_text import short_name
from perfmodel.parallel.rows import without_total
from perfmodel.parallel.serving.plan import COLUMNS
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.planner.serving.result import RankedPlan, ServingSearchResult
from perfmodel.report.serving import TIMES, limits_object, short_layout, throughput_object
from perfmodel.report.table import Table, table_of_rows, words

_HEADERS = {"concurrency": "in flight", "rate": "requests/s"}
_PERCENTILES = ("mean", "p50", "p90", "p99")


def serving_row(prediction: ServingPrediction) -> dict[str, Any]:
    """Return job, plan, results, decode-step parts and memory classes as one row."""
    job, plan = prediction.job, prediction.plan.to_dict()
    degrees = {name: plan.get(name) for name in COLUMNS}
    row: dict[str, Any] = {
        "model": job.model.name,
        "cluster": prediction.cluster,
        "chips": prediction.plan.num_chips,
        "input_len": job.input_len.most,
        "input_len_least": job.input_len.least,
        "output_len": job.output_len.most,
        "output_len_least": job.output_len.least,
        **picked(job, "concurrency rate prefix_hit"),
        "engine": prediction.plan.engine,
        "quantization": job.quantization.name,
        "kv_precision": str(job.kv_precision),
        **degrees,
        "workers": plan.get("workers", ""),
        "fits": prediction.fits,
        "fits_load": prediction.load.fits,
        "is_saturated": prediction.load.is_saturated,
    }
    for name in TIMES:
        spread = getattr(prediction, name)
        row |= {name if which == "mean" else f"{name}_{which}": _finite(getattr(spread, which)) for which in _PERCENTILES}
    row |= throughput_object(prediction) | {
        "queued": _finite(prediction.load.queued),
        "memory_total": prediction.memory["total"],
        "memory_usable": prediction.memory_usable,
    }
    row |= _bounds(prediction.intervals)
    row |= {f"time_{part}": time for part, time in prediction.parts.items()}
    row |= {f"memory_{kind}": size for kind, size in without_total(prediction.memory).items()}
    return row | {"notes": "; ".join(prediction.notes), "reason": ""}


def _bounds(intervals: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
    return {
        f"{name}_{end}": _finite(bound) for name, bounds in intervals.items() for end, bound in zip(("low", "high"), bounds, strict=True)
    }


def ranked_row(ranked: RankedPlan, *, rank: int, kind: str) -> dict[str, Any]:
    """Return a row of a search, with figures over all given chips, idle ones included.

    kind   aggregated or disaggregated
    """
    return {"place": rank, "kind": kind} | serving_row(ranked.prediction) | _bounds(ranked.intervals) | {
        "chips": ranked.plan.num_chips + ranked.idle_chips,
        **picked(ranked, "idle_chips tokens_per_second_per_chip"),
        "cost_per_million_tokens": ranked.cost_per_million,
        **picked(ranked, "meets reason"),
    }  # fmt: skip


def search_rows(result: ServingSearchResult) -> list[dict[str, Any]]:
    """Return one row per listed plan of a search."""
    rows = [ranked_row(ranked, rank=rank, kind="aggregated") for rank, ranked in enumerate(result.plans, 1) if ranked.plan.pools is None]
    return rows + [ranked_row(ranked, rank=rank, kind="disaggregated") for rank, ranked in enumerate(result.disaggregated, 1)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLine:
    """A row of a table of services.

    asked    request fields that differ between rows
    result   plan of a search or of the request; None without a result
    """

    asked: Mapping[str, Any]
    verdict: str
    result: RankedPlan | None = None

    @property
    def plan(self) -> str:
        return "" if self.result is None else short_layout(self.result.plan.layout)


def predicted_line(asked: Mapping[str, Any], prediction: ServingPrediction | None, limits: Mapping[str, float]) -> ServiceLine:
    """Return the row of one of several requests; `prediction` is None if it failed."""
    if prediction is None:
        return ServiceLine(asked=asked, verdict="not predicted")
    result = RankedPlan(
        prediction=prediction,
        tokens_per_second_per_chip=prediction.tokens_per_second_per_chip,
        cost_per_million=prediction.costs.cost_per_million,
        idle_chips=0,
    )
    return ServiceLine(asked=asked, result=result, verdict=short_verdict(prediction, limits))


def searched_line(asked: Mapping[str, Any], result: ServingSearchResult | None) -> ServiceLine:
    """Return the row of the best plan of one of several searches; `result` is None if no plan fits and meets the limits."""
    if result is None:
        return ServiceLine(asked=asked, verdict="no plan")
    return ServiceLine(asked=asked, result=result.best, verdict="meets" if result.limits.given() else "fits")


def services_table(lines: Sequence[ServiceLine], *, shows_load: bool = False, shows_chips: bool = False) -> Table:
    """Return one row per request: varied fields, plan, figures and verdict.

    shows_load, shows_chips   show the load or chip count that the search chose
    """
    varied = [name for name in lines[0].asked if name != "tp"] if lines else []
    has_plan = len({line.plan for line in lines if line.plan}) > 1 or shows_load or shows_chips
    has_cost = any(line.result is not None and line.result.cost_per_million is not None for line in lines)
    right = ("chips", "in flight", "requests/s", "TTFT", "TPOT", "tok/s/chip", "tok/s/user", "USD/M")

    def shown(name: str, value: object) -> str:
        if value is None:
            return "as fits" if name in ("concurrency", "rate") else ""
        return short_name(str(value)) if name == "cluster" else str(value)

    rows = []
    for line in lines:
        result = line.result
        row = {_HEADERS.get(name, name): shown(name, line.asked[name]) for name in varied}
        if shows_chips:
            row["chips"] = f"{result.plan.num_chips + result.idle_chips:,}" if result else ""
        if has_plan:
            row["plan"] = f"tp {line.asked['tp']}" if result is None and line.asked.get("tp") else line.plan
        if shows_load:
            row["in flight"] = load_cell(result) if result else ""
        fitting = result if result is not None and result.prediction.fits else None
        row |= {
            "TTFT": time_cell(fitting.prediction.ttft.mean) if fitting else "",
            "TPOT": time_cell(fitting.prediction.tpot.mean) if fitting else "",
            "tok/s/chip": f"{fitting.tokens_per_second_per_chip:,.0f}" if fitting else "",
            "tok/s/user": f"{fitting.prediction.tokens_per_second_per_user:,.1f}" if fitting else "",
        }
        if has_cost:
            row["USD/M"] = cost_cell(fitting) if fitting else ""
        rows.append(row | {"verdict": line.verdict})
    return table_of_rows(f"{len(lines)} services", rows, right=right, fold=("plan", "verdict"), optional=("USD/M", "tok/s/user"))


def load_cell(result: RankedPlan) -> str:
    """Return the concurrency of a plan; empty for a rate."""
    concurrency = result.prediction.job.concurrency
    return "" if concurrency is None else f"{concurrency:,}"


def time_cell(time: float) -> str:
    """Return a mean latency; it grows without bound where more requests come than are answered."""
    return format_time(time) if math.isfinite(time) else "endless"


def cost_cell(result: RankedPlan) -> str:
    """Return the cost of a million output tokens; empty without a known price."""
    return "" if result.cost_per_million is None else f"{result.cost_per_million:,.2f}"


def short_verdict(prediction: ServingPrediction, limits: Mapping[str, float]) -> str:
    """Return a short verdict: does not fit, cannot keep up, misses ttft, meets (all limits), or fits."""
    if not prediction.fits:
        return "does not fit"
    if prediction.load.is_saturated and prediction.job.rate is not None:
        return "cannot keep up"
    missed = [words(name) for name, result in limits_object(prediction, limits).items() if not result["kept_by_mean"]]
    if missed:
        return f"misses {', '.join(missed)}"
    waits = "" if prediction.load.fits else ", some wait"
    return ("meets" if limits else "fits") + waits
