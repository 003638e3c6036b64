"""Serving searches as tables and one object."""

from __future__ import annotations

from typing import Any

from perfmodel.foundation.units import format_time
from perfmodel.hardware.chip_cluster import chips_text, short_name
from perfmodel.parallel.serving.plan import ServingPlan
from perfmodel.planner.serving.result import RankedPlan, ServingObjective, ServingSearchResult
from perfmodel.report.serving import energy_facts, lengths_line, load_text, serving_object, short_plan
from perfmodel.report.table import Table, percent, rate
from perfmodel.workload.serving import ServingJob

#: Points of the front that are printed.
_SHOWN = 12
_WANTED = {
    ServingObjective.THROUGHPUT: "most output tokens/s a chip",
    ServingObjective.LATENCY: "least latency of a request",
    ServingObjective.COST: "least cost of an output token",
}


def search_line(job: ServingJob, found: ServingSearchResult, cluster: str) -> str:
    load = "the best load for each plan" if found.is_load_searched else load_text(job)
    return f"{job.model.name}, {lengths_line(job)}, {load}, on {chips_text(found.num_chips)} of {short_name(cluster)}"


def search_facts(found: ServingSearchResult) -> list[tuple[str, str]]:
    rejected = [f"{count:,} {reason}" for reason, count in sorted(found.rejected.items(), key=lambda each: -each[1])]
    left_out = [f"{count:,} {reason}" for reason, count in sorted(found.left_out.items(), key=lambda each: -each[1])]
    limits = str(found.limits)
    spare = f", each with {percent(found.limits.headroom)} to spare" if limits and found.limits.headroom else ""
    price = f"{found.price_per_hour:,.2f} USD an hour for a chip" if found.price_per_hour else ""
    facts = [
        ("objective", _WANTED[found.objective] + (f", under {limits}" if limits else "") + spare),
        ("plans", f"{found.num_evaluated:,} evaluated in {format_time(found.search_time)}, {found.num_feasible:,} feasible"),
        ("rejected", "; ".join(rejected)),
        ("left out", "; ".join(left_out)),
        ("price", price),
        *energy_facts(found.best.prediction),
    ]
    return [(name, text) for name, text in facts if text]


def plans_table(found: ServingSearchResult) -> Table:
    """The best of each layout and format."""
    return Table(
        title="Plans, best first",
        headers=_HEADERS,
        rows=tuple((str(place), *_row(ranked, found)) for place, ranked in enumerate(found.plans, 1)),
        right=_RIGHT,
        fold=("plan",),
        optional=("USD/M", "weights"),
    )


def search_details(found: ServingSearchResult) -> list[str]:
    """Notes for `--verbose`: why each plan is not the best, and what the baselines are or which limit they break."""
    reasons = [f"plan {place}: {ranked.reason}" for place, ranked in enumerate(found.plans, 1) if ranked.reason]
    return [*reasons, *(f"{each.name}: {each.reason or each.meaning}" for each in found.baselines)]


_HEADERS = ("", "plan", "weights", "in flight", "tok/s/chip", "tok/s/user", "TTFT", "TPOT", "USD/M")
_RIGHT = ("", "in flight", "tok/s/chip", "tok/s/user", "TTFT", "TPOT", "USD/M")


def _plan_text(plan: ServingPlan, found: ServingSearchResult) -> str:
    """A plan for a column, with its limit of batched tokens where the shown plans differ in it."""
    return short_plan(plan) + (f", {plan.max_tokens:,} batched" if plan.max_tokens and _budgets_differ(found) else "")


def _budgets_differ(found: ServingSearchResult) -> bool:
    baselines = [ranked.plan for each in found.baselines for ranked in each.plans[:1]]
    budgets = {each.max_tokens for each in (*(ranked.plan for ranked in found.plans), *baselines, *(point.plan for point in found.pareto))}
    return len(budgets) > 1


def _row(ranked: RankedPlan, found: ServingSearchResult) -> tuple[str, ...]:
    return (
        _plan_text(ranked.plan, found) + (f", {ranked.idle_chips} idle" if ranked.idle_chips else ""),
        ranked.prediction.job.quantization.name,
        *_figures(ranked),
    )


def _figures(ranked: RankedPlan) -> tuple[str, ...]:
    prediction = ranked.prediction
    at_once = prediction.job.concurrency
    return (
        f"{at_once:,}" if at_once is not None else "",
        rate(ranked.tokens_per_second_per_chip),
        f"{prediction.tokens_per_second_per_user:,.1f}",
        format_time(prediction.ttft.mean) if prediction.ttft.mean < float("inf") else "endless",
        format_time(prediction.tpot.mean),
        "" if ranked.cost_per_million is None else f"{ranked.cost_per_million:,.2f}",
    )


def pools_tables(found: ServingSearchResult) -> list[Table]:
    """Prefill and decode workers, against the best aggregated plan: figures, then plans."""
    title = "Disaggregated: prefill and decode workers" + ("" if found.disaggregated else ": none meets the limits")
    figures = tuple(
        (str(place), ranked.prediction.job.quantization.name, *_figures(ranked)) for place, ranked in enumerate(found.disaggregated, 1)
    )
    named = tuple(
        (str(place), f"{ranked.plan.label()}{f', {ranked.idle_chips} idle' if ranked.idle_chips else ''}")
        for place, ranked in enumerate(found.disaggregated, 1)
    )
    against = tuple(ranked.reason for ranked in found.disaggregated)
    headers = ("", *_HEADERS[2:], "against the best aggregated")
    first = Table(
        title=title,
        headers=headers,
        rows=tuple((*row, reason) for row, reason in zip(figures, against, strict=True)),
        right=_RIGHT,
        fold=("against the best aggregated",),
    )
    return [first, Table(title="", headers=("", "plan"), rows=named, right=("",), fold=("plan",))] if named else [first]


def baselines_table(found: ServingSearchResult) -> Table:
    """Table of baselines: plans that one would take without a search."""
    rows: list[tuple[str, ...]] = []
    for each in found.baselines:
        if not each.plans:
            rows.append((each.name, "none", *("",) * 6))
            continue
        ranked = each.plans[0]
        plan, fits = _plan_text(ranked.plan, found), ranked.prediction.fits
        rows.append((each.name, plan, *_figures(ranked)) if fits else (each.name, f"{plan}: does not fit", *("",) * 6))
    headers = ("baseline", "plan", *_HEADERS[3:])
    return Table(
        title="Without a search", headers=headers, rows=tuple(rows), right=_RIGHT[1:], fold=("plan",), optional=("USD/M", "tok/s/user")
    )


def front_table(found: ServingSearchResult) -> Table:
    """More tokens for a user cost tokens of a chip: no other plan at any load has more of both."""
    points = found.pareto
    step = max(-(-len(points) // _SHOWN), 1)
    shown = [*points[::step], *([points[-1]] if points and (len(points) - 1) % step else [])]
    return Table(
        title=f"Pareto front of throughput and speed by formulas: {len(points)} loads" + (f" (one in {step})" if step > 1 else ""),
        headers=("tok/s/user", "tok/s/chip", "plan", "weights", "in flight", "TTFT", "TPOT", "limits"),
        rows=tuple(
            (
                f"{each.tokens_per_second_per_user:,.1f}",
                rate(each.tokens_per_second_per_chip),
                _plan_text(each.plan, found),
                each.quantization,
                f"{each.concurrency:,}",
                format_time(each.ttft),
                format_time(each.tpot),
                "kept" if each.meets else "broken",
            )
            for each in shown
        ),
        right=("tok/s/user", "tok/s/chip", "in flight", "TTFT", "TPOT"),
        fold=("plan",),
        optional=("weights",),
    )


def search_tables(found: ServingSearchResult, *, with_pools: bool) -> list[Table]:
    """The best plans, separate prefill and decode workers where they were asked for and others are feasible, baselines and the front."""
    pools = pools_tables(found) if with_pools and found.num_feasible else []
    return [plans_table(found), *pools, baselines_table(found), front_table(found)]


def best_line(found: ServingSearchResult) -> str:
    """The best plan and its figures."""
    best = found.best
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


def search_notes(found: ServingSearchResult) -> list[str]:
    again = found.best.plan.pools
    fits = [] if found.num_feasible else ["no aggregated plan meets the limits; those below are disaggregated"]
    batched = "batched: most tokens of a step (max_num_batched_tokens of vLLM); the engine's default where none is named"
    pools = f"`perfmodel serve --workers {again.text}` predicts this plan by itself" if again is not None else ""
    return [text for text in (*fits, batched if _budgets_differ(found) else "", pools) if text]


def ranked_object(ranked: RankedPlan) -> dict[str, Any]:
    return {
        **serving_object(ranked.prediction),
        "intervals": {name: list(interval) for name, interval in ranked.intervals.items()},
        "tokens_per_second_per_chip": ranked.tokens_per_second_per_chip,
        "cost_per_million_tokens": ranked.cost_per_million,
        "idle_chips": ranked.idle_chips,
        "meets": ranked.meets,
        "reason": ranked.reason,
    }


def search_object(found: ServingSearchResult) -> dict[str, Any]:
    """Keys as those of `search --json`, and `pareto`."""
    return {
        "objective": str(found.objective),
        "limits": found.limits.given() | ({"p99": True} if found.limits.is_p99 else {}),
        "limit_headroom": found.limits.headroom,
        "chips": found.num_chips,
        "num_evaluated": found.num_evaluated,
        "num_feasible": found.num_feasible,
        "rejected": dict(found.rejected),
        "left_out": dict(found.left_out),
        "search_time": found.search_time,
        "plans": [ranked_object(ranked) for ranked in found.plans],
        "disaggregated": [ranked_object(ranked) for ranked in found.disaggregated],
        "best": ranked_object(found.best),
        "baselines": {
            each.name: {
                "meaning": each.meaning,
                "reason": each.reason,
                **(ranked_object(each.plans[0]) if each.plans else {"fits": False}),
            }
            for each in found.baselines
        },
        "pareto": [
            {
                "plan": each.plan.to_dict(),
                "quantization": each.quantization,
                "kv_precision": each.kv_precision,
                "concurrency": each.concurrency,
                "tokens_per_second_per_user": each.tokens_per_second_per_user,
                "tokens_per_second_per_chip": each.tokens_per_second_per_chip,
                "ttft": each.ttft,
                "tpot": each.tpot,
                "meets": each.meets,
            }
            for each in found.pareto
        ],
        "price_per_hour": found.price_per_hour or None,
    }
