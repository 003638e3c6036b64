"""Serving searches as tables and the `--json` object."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_time
from perfmodel.hardware.cluster_text import chips_text, short_name
from perfmodel.parallel.serving.plan import ServiceLayout, ServingLayout
from perfmodel.planner.serving.result import RankedPlan, ServingObjective, ServingSearchResult
from perfmodel.report.serving import basis_facts, energy_facts, lengths_line, load_text, serving_object, short_layout
from perfmodel.report.serving_rows import cost_cell, load_cell, time_cell
from perfmodel.report.table import Table, percent, rate, table_of
from perfmodel.workload.serving import ServingJob

#: Most printed points of the Pareto front.
_SHOWN = 12
_WANTED = {
    ServingObjective.THROUGHPUT: "most output tokens/s a chip",
    ServingObjective.LATENCY: "least latency of a request",
    ServingObjective.COST: "least cost of an output token",
}


def search_line(job: ServingJob, result: ServingSearchResult, cluster: str) -> str:
    load = "the best load for each plan" if result.is_load_searched else load_text(job)
    return f"{job.model.name}, {lengths_line(job)}, {load}, on {chips_text(result.num_chips)} of {short_name(cluster)}"


def search_facts(result: ServingSearchResult) -> list[tuple[str, str]]:
    rejected = [f"{count:,} {reason}" for reason, count in sorted(result.rejected.items(), key=lambda item: -item[1])]
    left_out = [f"{count:,} {reason}" for reason, count in sorted(result.left_out.items(), key=lambda item: -item[1])]
    limits = str(result.limits)
    spare = f", each with {percent(result.limits.headroom)} to spare" if limits and result.limits.headroom else ""
    price = f"{result.price_per_hour:,.2f} USD an hour for a chip" if result.price_per_hour else ""
    facts = [
        ("objective", _WANTED[result.objective] + (f", under {limits}" if limits else "") + spare),
        ("plans", f"{result.num_evaluated:,} evaluated in {format_time(result.search_time)}, {result.num_feasible:,} feasible"),
        ("rejected", "; ".join(rejected)),
        ("left out", "; ".join(left_out)),
        ("price", price),
        *energy_facts(result.best.prediction.costs),
        *basis_facts(result.best.prediction),
    ]
    return [(name, text) for name, text in facts if text]


def plans_table(result: ServingSearchResult) -> Table:
    """Return the table of the best plan per layout and format."""
    rows = (
        (
            str(rank),
            _layout_text(ranked.plan.layout, result) + (f", {ranked.idle_chips} idle" if ranked.idle_chips else ""),
            ranked.prediction.job.quantization.name,
            *_figures(ranked),
        )
        for rank, ranked in enumerate(result.plans, 1)
    )
    return replace(table_of("Plans, best first", f"> | ~plan | weights | {_FIGURES}", rows), optional=("USD/M", "weights"))


def search_details(result: ServingSearchResult) -> list[str]:
    """Return the `--verbose` notes: why each plan is not the best, and the meaning or the broken limit of each baseline."""
    reasons = [f"plan {rank}: {ranked.reason}" for rank, ranked in enumerate(result.plans, 1) if ranked.reason]
    return [*reasons, *(f"{baseline.name}: {baseline.reason or baseline.meaning}" for baseline in result.baselines)]


#: Columns of `_figures`.
_FIGURES = ">in flight | >tok/s/chip | >tok/s/user | >TTFT | >TPOT | >USD/M"


def _layout_text(layout: ServiceLayout, result: ServingSearchResult) -> str:
    """Return a layout for a table column, with its limit of batched tokens if the plans differ in it."""
    tokens = _max_tokens(layout)
    return short_layout(layout) + (f", {tokens:,} batched" if tokens and _budgets_differ(result) else "")


def _budgets_differ(result: ServingSearchResult) -> bool:
    baselines = [ranked for baseline in result.baselines for ranked in baseline.plans[:1]]
    layouts = [*(ranked.plan.layout for ranked in (*result.plans, *baselines)), *(point.layout for point in result.pareto)]
    return len({_max_tokens(layout) for layout in layouts}) > 1


def _max_tokens(layout: ServiceLayout) -> int:
    return layout.max_tokens if isinstance(layout, ServingLayout) else 0


def _figures(ranked: RankedPlan) -> tuple[str, ...]:
    prediction = ranked.prediction
    return (
        load_cell(ranked),
        rate(ranked.tokens_per_second_per_chip),
        f"{prediction.tokens_per_second_per_user:,.1f}",
        time_cell(prediction.ttft.mean),
        format_time(prediction.tpot.mean),
        cost_cell(ranked),
    )


def pools_tables(result: ServingSearchResult) -> list[Table]:
    """Return tables of disaggregated plans against the best aggregated plan: figures, then plans."""
    title = "Disaggregated: prefill and decode workers" + ("" if result.disaggregated else ": none meets the limits")
    figures, named = [], []
    for rank, ranked in enumerate(result.disaggregated, 1):
        figures.append((str(rank), ranked.prediction.job.quantization.name, *_figures(ranked), ranked.reason))
        named.append((str(rank), f"{ranked.plan.label()}{f', {ranked.idle_chips} idle' if ranked.idle_chips else ''}"))
    first = table_of(title, f"> | weights | {_FIGURES} | ~against the best aggregated", figures)
    return [first, table_of("", "> | ~plan", named)] if named else [first]


def baselines_table(result: ServingSearchResult) -> Table:
    """Return the table of baselines."""
    rows: list[tuple[str, ...]] = []
    for baseline in result.baselines:
        if not baseline.plans:
            rows.append((baseline.name, "none", *("",) * 6))
            continue
        ranked = baseline.plans[0]
        plan, fits = _layout_text(ranked.plan.layout, result), ranked.prediction.fits
        rows.append((baseline.name, plan, *_figures(ranked)) if fits else (baseline.name, f"{plan}: does not fit", *("",) * 6))
    return replace(table_of("Without a search", f"baseline | ~plan | {_FIGURES}", rows), optional=("USD/M", "tok/s/user"))


def front_table(result: ServingSearchResult) -> Table:
    """Return the Pareto front: no other plan at any load has more tokens/s per user and per chip."""
    points = result.pareto
    step = max(-(-len(points) // _SHOWN), 1)
    shown = [*points[::step], *([points[-1]] if points and (len(points) - 1) % step else [])]
    rows = (
        (
            f"{point.tokens_per_second_per_user:,.1f}",
            rate(point.tokens_per_second_per_chip),
            _layout_text(point.layout, result),
            point.quantization,
            f"{point.concurrency:,}",
            format_time(point.ttft),
            format_time(point.tpot),
            "kept" if point.meets else "broken",
        )
        for point in shown
    )
    title = f"Pareto front of throughput and speed by formulas: {len(points)} loads" + (f" (one in {step})" if step > 1 else "")
    return table_of(title, ">tok/s/user | >tok/s/chip | ~plan | ?weights | >in flight | >TTFT | >TPOT | limits", rows)


def search_tables(result: ServingSearchResult, *, with_pools: bool) -> list[Table]:
    """Return the tables of best plans, disaggregated plans, baselines and Pareto front.

    with_pools   include disaggregated plans, if aggregated ones are feasible
    """
    pools = pools_tables(result) if with_pools and result.num_feasible else []
    return [plans_table(result), *pools, baselines_table(result), front_table(result)]


def best_line(result: ServingSearchResult) -> str:
    """Return the best plan and its figures in one line."""
    best = result.best
    prediction = best.prediction
    in_flight, cost = prediction.job.concurrency, best.cost_per_million
    figures = [
        f"{rate(best.tokens_per_second_per_chip)} output tokens/s a chip",
        *([f"{in_flight:,} {'request' if in_flight == 1 else 'requests'} in flight"] if in_flight is not None else []),
        f"TTFT {format_time(prediction.ttft.mean)}",
        f"TPOT {format_time(prediction.tpot.mean)}",
        *([f"{cost:,.2f} USD a million output tokens"] if cost is not None else []),
    ]
    return f"The best plan: {best.plan.label()}; {', '.join(figures)}"


def search_notes(result: ServingSearchResult) -> list[str]:
    again = result.best.plan.pools
    fits = [] if result.num_feasible else ["no aggregated plan meets the limits; those below are disaggregated"]
    batched = "batched: most tokens of a step (max_num_batched_tokens of vLLM); the engine's default where none is named"
    pools = f"`perfmodel serve --workers {again.text}` predicts this plan by itself" if again is not None else ""
    return [text for text in (*fits, batched if _budgets_differ(result) else "", pools) if text]


def ranked_object(ranked: RankedPlan) -> dict[str, Any]:
    return {
        **serving_object(ranked.prediction),
        "intervals": {name: list(interval) for name, interval in ranked.intervals.items()},
        "tokens_per_second_per_chip": ranked.tokens_per_second_per_chip,
        "cost_per_million_tokens": ranked.cost_per_million,
        **picked(ranked, "idle_chips meets reason"),
    }


def search_object(result: ServingSearchResult) -> dict[str, Any]:
    """Return the `--json` object: the keys of `search --json`, and `pareto`."""
    return {
        "objective": str(result.objective),
        "limits": result.limits.given() | ({"p99": True} if result.limits.is_p99 else {}),
        "limit_headroom": result.limits.headroom,
        "chips": result.num_chips,
        **picked(result, "num_evaluated num_feasible rejected left_out search_time"),
        "plans": list(map(ranked_object, result.plans)),
        "disaggregated": list(map(ranked_object, result.disaggregated)),
        "best": ranked_object(result.best),
        "baselines": {
            baseline.name: {
                **picked(baseline, "meaning reason"),
                **(ranked_object(baseline.plans[0]) if baseline.plans else {"fits": False}),
            }
            for baseline in result.baselines
        },
        "pareto": [
            {"plan": {"engine": result.best.plan.engine, **point.layout.to_dict()}, **picked(point, _POINT)} for point in result.pareto
        ],
        "price_per_hour": result.price_per_hour or None,
    }


_POINT = "quantization kv_precision concurrency tokens_per_second_per_user tokens_per_second_per_chip ttft tpot meets"
