"""What a search among plans of serving says: for people as tables, for programs as one object."""

from __future__ import annotations

from typing import Any

from perfmodel.foundation.units import format_time
from perfmodel.hardware.chip_cluster import chips_text, short_name
from perfmodel.planner.serving.result import RankedPlan, ServingObjective, ServingSearchResult
from perfmodel.report.serving import lengths_line, load_text, serving_object
from perfmodel.report.table import Table, percent
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
        ("wanted", _WANTED[found.objective] + (f", under {limits}" if limits else "") + spare),
        ("plans", f"{found.num_evaluated:,} evaluated in {format_time(found.search_time)}, {found.num_feasible:,} of them can be chosen"),
        ("not these", "; ".join(rejected)),
        ("no layouts", "; ".join(left_out)),
        ("price", price),
        ("note", "" if found.num_feasible else "no plan whose workers do both meets the limits: those below have workers of two kinds"),
    ]
    return [(name, text) for name, text in facts if text]


def plans_table(found: ServingSearchResult) -> Table:
    """The best of each layout and format."""
    return Table(
        title="Plans, best first",
        headers=_HEADERS,
        rows=tuple(_row(str(place), ranked, ranked.reason) for place, ranked in enumerate(found.plans, 1)),
        right=_RIGHT,
        fold=("plan", "why not the best"),
    )


_HEADERS = ("", "plan", "weights", "at once", "tokens/s/chip", "tokens/s/user", "TTFT", "TPOT", "USD/M tokens", "why not the best")
_RIGHT = ("", "at once", "tokens/s/chip", "tokens/s/user", "TTFT", "TPOT", "USD/M tokens")


def _row(name: str, ranked: RankedPlan, reason: str) -> tuple[str, ...]:
    prediction = ranked.prediction
    at_once = prediction.job.concurrency
    return (
        name,
        ranked.plan.label() + (f", {ranked.idle_chips} idle" if ranked.idle_chips else ""),
        prediction.job.quantization.name,
        f"{at_once:,}" if at_once is not None else "",
        f"{ranked.tokens_per_second_per_chip:,.0f}",
        f"{prediction.tokens_per_second_per_user:,.1f}",
        format_time(prediction.ttft.mean) if prediction.ttft.mean < float("inf") else "endless",
        format_time(prediction.tpot.mean),
        "" if ranked.cost_per_million is None else f"{ranked.cost_per_million:,.2f}",
        reason,
    )


def pools_table(found: ServingSearchResult) -> Table:
    """Workers for prompts and others for answers, against the best plan whose workers do both."""
    headers = (*_HEADERS[:-1], "against the best of the others")
    rows = tuple(_row(str(place), ranked, ranked.reason) for place, ranked in enumerate(found.disaggregated, 1))
    title = "Prompts and answers on workers of their own" + ("" if rows else ": none meets the limits")
    return Table(title=title, headers=headers, rows=rows, right=_RIGHT, fold=("plan", "against the best of the others"))


def baselines_table(found: ServingSearchResult) -> Table:
    """What one would take without a search."""
    rows = [
        _row(each.name, each.found[0], each.reason or each.meaning) if each.found else (each.name, *("",) * 8, each.reason)
        for each in found.baselines
    ]
    headers = ("baseline", *_HEADERS[1:-1], "what it is")
    return Table(
        title="What one would take without a search", headers=headers, rows=tuple(rows), right=_RIGHT[1:], fold=("plan", "what it is")
    )


def front_table(found: ServingSearchResult) -> Table:
    """More tokens for a user cost tokens of a chip: no other plan at any load has more of both."""
    points = found.pareto
    step = max(-(-len(points) // _SHOWN), 1)
    shown = [*points[::step], *([points[-1]] if points and (len(points) - 1) % step else [])]
    return Table(
        title=f"The front: {len(points)} plans and loads than which none has more of both"
        + (f" (one in {step} is shown)" if step > 1 else ""),
        headers=("tokens/s/user", "tokens/s/chip", "plan", "weights", "in flight", "TTFT", "TPOT", "limits"),
        rows=tuple(
            (
                f"{each.tokens_per_second_per_user:,.1f}",
                f"{each.tokens_per_second_per_chip:,.0f}",
                each.plan.label(),
                each.quantization,
                f"{each.concurrency:,}",
                format_time(each.ttft),
                format_time(each.tpot),
                "kept" if each.meets else "broken",
            )
            for each in shown
        ),
        right=("tokens/s/user", "tokens/s/chip", "in flight", "TTFT", "TPOT"),
    )


def ranked_object(ranked: RankedPlan) -> dict[str, Any]:
    return {
        **serving_object(ranked.prediction),
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
        "baselines": {
            each.name: {
                "meaning": each.meaning,
                "reason": each.reason,
                **(ranked_object(each.found[0]) if each.found else {"fits": False}),
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


__all__ = ["baselines_table", "front_table", "plans_table", "pools_table", "ranked_object", "search_facts", "search_line", "search_object"]
