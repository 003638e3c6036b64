"""Searches as lines and the `--json` object, of training plans and of plans of a service."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_bytes, format_step, format_time
from perfmodel.frameworks.profile import GENERIC
from perfmodel.hardware.cluster_text import chips_text, short_name
from perfmodel.parallel.framework_ref import flags_text
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan, plan_to_dict
from perfmodel.parallel.prediction import PROBABILITY, Prediction, probability_cell
from perfmodel.parallel.serving_prediction import lengths_line, load_text
from perfmodel.planner.explain import Alternative, Explanation
from perfmodel.planner.result import FittingChange, RankedPlan, ServingObjective, ServingSearch, TrainingSearch
from perfmodel.report.advice import remedies_objects
from perfmodel.report.predictions import (
    PLAN_LEGEND,
    fits_cell,
    headroom_words,
    plan_cells,
    plan_line,
    prediction_object,
)
from perfmodel.report.search_tables import UNABLE_MARK, budgets_differ, plans_table, relative_to_best
from perfmodel.report.serving import basis_facts, energy_facts, serving_object
from perfmodel.report.table import Table, bytes_like, rate, table_of, times_like
from perfmodel.report.trust import trust_object
from perfmodel.workload.serving import ServingJob

#: Most values of a knob in the line of nearly equal plans.
_ALIKE_VALUES = 3


def search_object(result: TrainingSearch, *, tokens: float = 0.0) -> dict[str, Any]:
    """Return the result as the `--json` object, in SI units."""

    def described(predictions: tuple[Prediction, ...]) -> list[dict[str, Any]]:
        return [prediction_object(prediction, tokens=tokens) for prediction in predictions]

    ranking = result.ranking
    certainties = []  # the fastest plan at each risk; null if no plan fits
    for certainty in result.certainty:
        best = certainty.prediction[0] if certainty.prediction else None
        certainties.append(
            {
                "risk": certainty.risk,
                "step_time": best.step_time if best else None,
                "fits_probability": best.fits_probability if best else None,
                "plan": plan_to_dict(best.plan) if best else None,
            }
        )
    return {
        **picked(result, "objective num_evaluated num_feasible num_tight rejected left_out search_time interrupted"),
        "memory_capacity": result.conditions.capacity,
        "memory_usable": result.conditions.usable,
        "memory_headroom": result.conditions.headroom,
        "risk": result.conditions.risk,
        "certainty": certainties,
        "least_time": result.ranking.least_time if math.isfinite(result.ranking.least_time) else None,
        "ties": ranking.ties,
        "expectation": {"best": expectation.best, "first": expectation.first} if (expectation := ranking.expectation) else None,
        "plans": [
            plan | {"place": rank} | ({"objective_value": value} if value is not None else {})
            for plan, rank, value in zip(described(result.plans), ranking.places, ranking.values or [None] * len(result.plans), strict=True)
        ],
        "baselines": {
            baseline.name: prediction_object(baseline.plans[0], tokens=tokens) | {"means": baseline.meaning}
            if baseline.plans
            else {"fits": False, "reason": baseline.reason}
            for baseline in result.baselines
        },
        "pareto": described(result.pareto),
        **({} if result.plans else {"remedies": remedies_objects(result.remedies)}),
        "any_framework": described(result.any_framework)[0] if result.any_framework else {},
        "least_memory": described(result.least_memory)[0] if result.least_memory else {},
    }


def search_line(result: TrainingSearch) -> str:
    rate, speed = result.num_evaluated / max(result.search_time, 1e-9), ""
    if result.search_time > 0.05 and rate >= 1e3:  # else the search was too short to measure it
        speed = f", {rate / 1e6:.1f} million a second" if rate >= 1e6 else f", {rate / 1e3:.0f} thousand a second"
    budget = result.conditions
    memory = f"{format_bytes(budget.usable)} usable"
    if budget.risk is not None or budget.headroom:
        memory += f" {headroom_words(budget.headroom, budget.risk)}"
    return (
        f"{result.num_evaluated:,} plans evaluated in {format_time(result.search_time)}{speed}; "
        f"{result.num_feasible:,} fit in {memory}; ranked by {result.objective}"
    )


def other_lines(result: TrainingSearch) -> list[str]:
    """Return the lines below the table: nearly equal plans of each plan, and axis orders unless all are the default."""
    orders: dict[tuple[str, ...], list[str]] = {}
    for name, prediction in _named_plans(result):
        orders.setdefault(prediction.plan.order, []).append(name)
    unusual = [f"{'-'.join(order)} of {', '.join(names)}" for order, names in orders.items() if order != DEFAULT_ORDER]
    others = [f"{'-'.join(DEFAULT_ORDER)} of the others"] if DEFAULT_ORDER in orders else []
    lines = [f"axis order on the network, innermost first: {'; '.join([*unusual, *others])}"] if unusual else []
    for number, kind in enumerate(result.ranking.kinds, 1):
        cells = _alike_cells(kind.prediction.plan)
        differing: dict[str, list[str]] = {}  # knob -> values of nearly equal plans that the printed plan does not have
        for plan in kind.alike:
            for knob, value in _alike_cells(plan).items():
                if value != cells[knob] and value not in differing.setdefault(knob, []):
                    differing[knob].append(value)
        texts = [
            f"{knob} {', '.join(values[:_ALIKE_VALUES])}{', ...' if len(values) > _ALIKE_VALUES else ''}"
            for knob, values in differing.items()
        ]
        if texts:
            lines.append(f"as good as {number} with: {'; '.join(texts)}")
    return lines


def _alike_cells(plan: Plan) -> dict[str, str]:
    cells = plan_cells(plan)
    return {
        "schedule": cells["schedule"].removeprefix("interleaved "),
        "dp": cells["dp"].replace(" ", ""),
        "zero": cells["zero"],
        "axis order": "-".join(plan.order),
        "stages": "even" if len(set(plan.stage_layers)) <= 1 else "uneven",
    }


def ties_line(result: TrainingSearch) -> str:
    """Return the explanation of ties, or why the first plan is not the fastest."""
    if (expectation := result.ranking.expectation) is not None:
        is_unknown = result.plans[0].plan.framework.name == GENERIC
        known = "the known frameworks" if is_unknown else "the profiles that agree with your runs"
        return (
            f"plan 1 has the least expected time over {known}, {format_step(expectation.best)}; for the plan with the least predicted "
            f"time it is {format_step(expectation.first)}, because it needs what some of them lack"
        )
    tied = sum(rank == 1 for rank in result.ranking.places)
    if tied < 2 or not result.ranking.ties:
        return ""
    by_memory = str(result.objective) == "memory"
    first = "has" if by_memory else "most likely fits, then has"
    least = "" if by_memory else f" (the least time of any plan that fits is {format_step(result.ranking.least_time)})"
    return (
        f"plans within {percent(result.ranking.ties)} tie (--ties): plan 1 {first} the fewest "
        f"forms of parallelism, then the least {'time' if by_memory else 'memory'}{least}"
    )


def _named_plans(result: TrainingSearch) -> list[tuple[str, Prediction]]:
    """Return the best plans by number, then the baselines by name."""
    best = [(str(number), kind.prediction) for number, kind in enumerate(result.ranking.kinds, 1)]
    return best + [(baseline.name, baseline.plans[0]) for baseline in result.baselines if baseline.plans]


def not_runnable_lines(result: TrainingSearch) -> list[str]:
    """Return the footnotes of plans that the assumed framework cannot run, one per reason."""
    names: dict[str, list[str]] = {}
    for name, prediction in _named_plans(result):
        if prediction.not_runnable:
            names.setdefault(f"not a plan for this framework: {prediction.not_runnable}", []).append(name)
    return [f"{UNABLE_MARK} {', '.join(plans)}: {reason}" for reason, plans in names.items()]


def any_framework_line(result: TrainingSearch) -> str:
    """Return the gain of a search without the framework's limits; empty if there is none."""
    if not result.any_framework:
        return ""
    other = result.any_framework[0]
    framework = other.plan.framework.name
    by_memory = str(result.objective) == "memory"
    if not result.plans:
        gain = f"a plan fits, {format_bytes(other.memory['total'])} a chip and {format_step(other.step_time)} a step"
    elif by_memory:
        saved = 1.0 - other.memory["total"] / result.plans[0].memory["total"]
        gain = f"{percent(saved)} less memory ({format_bytes(other.memory['total'])})"
    else:
        gain = f"{percent(result.plans[0].step_time / other.step_time - 1.0)} faster ({format_step(other.step_time)})"
    return f"--any-framework: {gain} with what {framework} cannot run ({other.not_runnable})"


def search_notes(result: TrainingSearch) -> list[str]:
    """Return the notes on the tables, most important first."""
    table = plans_table(result)
    legend = "; ".join(f"{header}: {meaning}" for header, meaning in PLAN_LEGEND.items() if header in table.headers)
    return [
        line
        for line in (*not_runnable_lines(result), any_framework_line(result), ties_line(result), legend if result.plans else "")
        if line
    ]


def search_details(result: TrainingSearch) -> list[str]:
    """Return the `--verbose` notes: nearly equal plans and meanings of the baselines."""
    return [*other_lines(result), *(f"{baseline.name}: {baseline.meaning}" for baseline in result.baselines if baseline.plans)]


def nothing_fits_line(result: TrainingSearch, *, given: bool) -> str:
    """Return one sentence: least memory of any plan against the usable memory, and the remedies."""
    least = result.least_memory[0]
    remedies = list(map(_remedy_text, result.remedies))
    remedy = "; or ".join(remedies) or "use chips with more memory, a smaller model or shorter sequences"
    if given and not remedies:
        remedy += ", or free some of the knobs that were given"
    memory = result.conditions
    free = f" {headroom_words(memory.headroom, memory.risk)}" if memory.headroom or memory.risk else ""
    ranks = "a larger --risk" if memory.risk else "--memory-headroom 0"
    tight = f" ({result.num_tight:,} plans are tight: they fit into all of it, {ranks} ranks them)" if result.num_tight else ""
    return (
        f"no plan fits: the least that any of {result.num_evaluated:,} plans needs is {format_bytes(least.memory['total'])} a chip, of "
        f"{format_bytes(memory.usable)} usable{free}{tight} ({plan_line(least.plan)}); {remedy}"
    )


def _remedy_text(remedy: FittingChange) -> str:
    step = format_step(remedy.prediction.step_time)
    knobs = {name: value for name, value in remedy.changes.items() if name != "chips"}
    flags = flags_text(knobs)
    if "chips" in remedy.changes:
        return f"{remedy.changes['chips']:,} chips would be enough{f' with {flags}' if flags else ''} ({step} a step)"
    return f"{flags} would fit ({step} a step)"


def explanation_object(explanation: Explanation) -> dict[str, Any]:
    def described(alternative: Alternative) -> dict[str, Any]:
        return {
            "knobs": dict(alternative.knobs),
            **picked(alternative, "reason slower_by"),
            "parts": dict(alternative.parts),
            "changed": dict(alternative.changed),
            "prediction": prediction_object(alternative.prediction[0]) if alternative.prediction else {},
        }

    return {
        **prediction_object(explanation.prediction),
        "bottleneck": explanation.bottleneck,
        "neighbours": [described(alternative) for alternative in explanation.neighbours],
        "why_not": [described(alternative) for alternative in explanation.why_not],
        **({} if explanation.prediction.fits else {"remedies": remedies_objects(explanation.remedies)}),
        **({} if explanation.trust is None else {"trust": trust_object(explanation.trust, explanation.prediction.step_time)}),
    }


def neighbours_table(explanation: Explanation) -> Table:
    """Return the neighbours of a plan (one knob changed): fitting ones by step time, then non-fitting, then invalid."""
    step_time = explanation.prediction.step_time
    step, size = times_like(step_time), bytes_like(explanation.prediction.memory_usable)

    def rank(alternative: Alternative) -> tuple[int, float]:
        if not alternative.prediction:
            return (2, 0.0)
        return (0 if alternative.prediction[0].fits else 1, alternative.prediction[0].step_time)

    rows = []
    for neighbour in sorted(explanation.neighbours, key=rank):
        prediction = neighbour.prediction[0] if neighbour.prediction else None
        change = neighbour.reason.partition(": ")[2] if prediction is None else ""
        if prediction is not None and prediction.fits and neighbour.slower_by:
            sign = 1.0 if neighbour.slower_by > 0 else -1.0
            along = {part: sign * difference for part, difference in neighbour.parts.items()}  # the direction of the total change
            part = max(along, key=along.__getitem__)
            change = f"{part.replace('_', ' ')} {'+' if neighbour.parts[part] > 0 else '-'}{format_time(abs(along[part]))}"
        cells: tuple[str, ...] = ("-",) * 5
        if prediction is not None:
            cells = (
                step(prediction.step_time),
                relative_to_best(prediction.step_time, step_time),
                size(prediction.memory["total"]),
                fits_cell(prediction.verdict),
                probability_cell(prediction.fits_probability),
            )
        rows.append((knobs_text({**neighbour.knobs, **neighbour.changed}), *cells, change))
    columns = f"~knob | >step time | >change | >memory | ?fits | >{PROBABILITY} | ~largest change"
    return table_of("One knob changed, with every other knob that has to follow", columns, rows)


def knobs_text(knobs: Mapping[str, int | str | bool]) -> str:
    return ", ".join(f"{knob}={str(value).lower()}" for knob, value in knobs.items())


# --- plans of a service ----------------------------------------------------------------------------------------------

_WANTED = {
    ServingObjective.THROUGHPUT: "most output tokens/s a chip",
    ServingObjective.LATENCY: "least latency of a request",
    ServingObjective.COST: "least cost of an output token",
}


def service_search_line(job: ServingJob, result: ServingSearch, cluster: str) -> str:
    load = "the best load for each plan" if result.conditions.is_load_searched else load_text(job)
    return f"{job.model.name}, {lengths_line(job)}, {load}, on {chips_text(result.conditions.num_chips)} of {short_name(cluster)}"


def service_search_facts(result: ServingSearch) -> list[tuple[str, str]]:
    rejected = [f"{count:,} {reason}" for reason, count in sorted(result.rejected.items(), key=lambda item: -item[1])]
    left_out = [f"{count:,} {reason}" for reason, count in sorted(result.left_out.items(), key=lambda item: -item[1])]
    limits = str(result.conditions.limits)
    spare = f", each with {percent(result.conditions.limits.headroom)} to spare" if limits and result.conditions.limits.headroom else ""
    price = f"{result.conditions.price_per_hour:,.2f} USD an hour for a chip" if result.conditions.price_per_hour else ""
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


def service_search_details(result: ServingSearch) -> list[str]:
    """Return the `--verbose` notes: why each plan is not the best, and the meaning or the broken limit of each baseline."""
    reasons = [f"plan {rank}: {ranked.reason}" for rank, ranked in enumerate(result.plans, 1) if ranked.reason]
    return [*reasons, *(f"{baseline.name}: {baseline.reason or baseline.meaning}" for baseline in result.baselines)]


def best_line(result: ServingSearch) -> str:
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


def service_search_notes(result: ServingSearch) -> list[str]:
    again = result.best.plan.pools
    fits = [] if result.num_feasible else ["no aggregated plan meets the limits; those below are disaggregated"]
    batched = "batched: most tokens of a step (max_num_batched_tokens of vLLM); the engine's default where none is named"
    pools = f"`perfmodel serve --workers {again.text}` predicts this plan by itself" if again is not None else ""
    return [text for text in (*fits, batched if budgets_differ(result) else "", pools) if text]


def ranked_object(ranked: RankedPlan) -> dict[str, Any]:
    return {
        **serving_object(ranked.prediction),
        "intervals": {name: list(interval) for name, interval in ranked.intervals.items()},
        "tokens_per_second_per_chip": ranked.tokens_per_second_per_chip,
        "cost_per_million_tokens": ranked.cost_per_million,
        **picked(ranked, "idle_chips meets reason"),
    }


def service_search_object(result: ServingSearch) -> dict[str, Any]:
    """Return the `--json` object: the keys of `search --json`, and `pareto`."""
    return {
        "objective": str(result.objective),
        "limits": result.conditions.limits.given() | ({"p99": True} if result.conditions.limits.is_p99 else {}),
        "limit_headroom": result.conditions.limits.headroom,
        "chips": result.conditions.num_chips,
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
        "price_per_hour": result.conditions.price_per_hour or None,
    }


_POINT = "quantization kv_precision concurrency tokens_per_second_per_user tokens_per_second_per_chip ttft tpot meets"
