"""Search results as tables, lines and the `--json` object."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_bytes, format_step, format_time
from perfmodel.frameworks.profile import GENERIC
from perfmodel.parallel.algebra.rules import rule_labels
from perfmodel.parallel.choices import ULYSSES, ULYSSES_RULES
from perfmodel.parallel.framework_ref import flags_text
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.parallel.plan import Plan, plan_to_dict
from perfmodel.parallel.prediction import PROBABILITY, Prediction, probability_cell
from perfmodel.planner.baselines import MEANINGS
from perfmodel.planner.explain import Alternative, Explanation
from perfmodel.planner.result import FittingChange, Objective, SearchResult
from perfmodel.report.advice import remedies_objects
from perfmodel.report.predictions import (
    PLAN_LEGEND,
    fits_cell,
    headroom_words,
    plan_cells,
    plan_line,
    prediction_object,
    short_plan_text,
)
from perfmodel.report.table import Table, bytes_like, percent, table_of, table_of_rows, times_like
from perfmodel.report.training_run import JOULES_OF_A_MEGAWATT_HOUR
from perfmodel.report.trust import trust_object

#: Most values of a knob in the line of nearly equal plans.
_ALIKE_VALUES = 3
#: Mark of the name of a plan that the assumed framework cannot run.
_MARK = "*"


def search_object(result: SearchResult, *, tokens: float = 0.0) -> dict[str, Any]:
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
        "memory_capacity": result.memory.capacity,
        "memory_usable": result.memory.usable,
        "memory_headroom": result.memory.headroom,
        "risk": result.memory.risk,
        "certainty": certainties,
        "least_time": result.least_time if math.isfinite(result.least_time) else None,
        "ties": ranking.ties,
        "expectation": {"best": expectation.best, "first": expectation.first} if (expectation := ranking.expectation) else None,
        "plans": [
            plan | {"place": rank} | ({"objective_value": value} if value is not None else {})
            for plan, rank, value in zip(described(result.plans), ranking.places, ranking.values or [None] * len(result.plans), strict=True)
        ],
        "baselines": {
            baseline.name: prediction_object(baseline.prediction[0], tokens=tokens) | {"means": MEANINGS[baseline.name]}
            if baseline.prediction
            else {"fits": False, "reason": baseline.reason}
            for baseline in result.baselines
        },
        "pareto": described(result.pareto),
        **({} if result.plans else {"remedies": remedies_objects(result.remedies)}),
        "any_framework": described(result.any_framework)[0] if result.any_framework else {},
        "least_memory": described(result.least_memory)[0] if result.least_memory else {},
    }


def certainty_table(result: SearchResult) -> Table:
    """Return the table of the fastest plan at each risk of running out of memory."""
    best = [certainty.prediction[0].step_time for certainty in result.certainty if certainty.prediction]
    step = times_like(min(best, default=1.0))
    rows: list[tuple[str, ...]] = []
    for certainty in result.certainty:
        cells: tuple[str, ...] = ("-", "-", "-", "none")
        for prediction in certainty.prediction:
            slower, share = _relative_to_best(prediction.step_time, best[0]), probability_cell(prediction.fits_probability)
            cells = (step(prediction.step_time), slower, share, short_plan_text(prediction.plan))
        rows.append((percent(certainty.risk), *cells))
    columns = f">risk | >step time | >slower | >{PROBABILITY} | ~plan"
    return table_of("Fastest plan at each risk of running out of memory", columns, rows)


def search_line(result: SearchResult) -> str:
    rate, speed = result.num_evaluated / max(result.search_time, 1e-9), ""
    if result.search_time > 0.05 and rate >= 1e3:  # else the search was too short to measure it
        speed = f", {rate / 1e6:.1f} million a second" if rate >= 1e6 else f", {rate / 1e3:.0f} thousand a second"
    budget = result.memory
    memory = f"{format_bytes(budget.usable)} usable"
    if budget.risk is not None or budget.headroom:
        memory += f" {headroom_words(budget.headroom, budget.risk)}"
    return (
        f"{result.num_evaluated:,} plans evaluated in {format_time(result.search_time)}{speed}; "
        f"{result.num_feasible:,} fit in {memory}; ranked by {result.objective}"
    )


#: Objective of the whole training run -> column header and format of its value.
_VALUES: Mapping[Objective, tuple[str, Callable[[float], str]]] = {
    Objective.COST: ("run USD", lambda value: f"{value:,.0f}"),
    Objective.ENERGY: ("run MWh", lambda value: f"{value / JOULES_OF_A_MEGAWATT_HOUR:,.1f}"),
    Objective.GOODPUT_TIME: ("run days", lambda value: f"{value:,.1f}"),
}


def value_cells(objective: Objective, values: Sequence[float]) -> dict[str, list[str]]:
    """Return the column of an objective of the whole training run, header -> cells; empty for other objectives."""
    if objective not in _VALUES:
        return {}
    header, text = _VALUES[objective]
    return {header: [text(value) for value in values]}


def plans_table(result: SearchResult) -> Table:
    """Return the table of the best plans, one row per group of nearly equal plans.

    Only knobs that differ have a column; the caption lists the others. Columns that repeat information of others are on wide pages only.
    """
    best = result.plans[0].step_time if result.plans else 0.0
    kinds = result.ranking.kinds
    shown = [kind.prediction for kind in kinds]
    step, size = times_like(min((prediction.step_time for prediction in shown), default=1.0)), bytes_like(result.memory.usable)
    positions = [kind.position for kind in kinds]
    ranks = []  # `1-3` for the first three of a tie
    for position in positions:
        first, tied = positions.index(position) + 1, positions.count(position)
        ranks.append(f"{first}-{first + tied - 1}" if tied > 1 else str(first))
    cuts = _cut_cells([prediction.plan for prediction in shown])
    unit = size(result.memory.usable).rpartition(" ")[2]
    of_run = value_cells(result.objective, [kind.value for kind in kinds if kind.value is not None])
    rows, knobs = [], []
    for index, (rank, prediction) in enumerate(zip(ranks, shown, strict=True)):
        knobs.append(plan_cells(prediction.plan) | {header: cells[index] for header, cells in cuts.items()})
        rows.append(
            {"plan": f"{index + 1}{_MARK if prediction.not_runnable else ''}"}
            | {header: cells[index] for header, cells in of_run.items()}
            | _result_cells(prediction, best, step, size)
            | knobs[index]
            | {"place": rank, "TFLOP/s": f"{prediction.tflops_per_chip:,.0f}", "fits": fits_cell(prediction.verdict)}
        )
    shared = [name for name in knobs[0] if len({row[name] for row in rows}) == 1] if len(rows) > 1 else []
    same = [f"{name} {rows[0][name]}" for name in shared if rows[0][name] not in ("-", "")]
    return table_of_rows(
        "Best plans",
        [{name: cell for name, cell in row.items() if name not in shared} for row in rows],
        caption=f"in every row: {', '.join(same)}" if same else "",
        right=(*of_run, "step time", "vs 1", "TFLOP/s", "MFU", unit, PROBABILITY, "tp", "cp", "pp", "dp", "zero", "micro"),
        optional=("place", "TFLOP/s", "fits", "MFU", "vs 1", "sp", "rules", "schedule"),
    )


def _cut_cells(plans: Sequence[Plan]) -> dict[str, list[str]]:
    """Return the column of the rule sets, header -> cells: the form of context parallelism if they differ in no more; empty by default."""
    labels = {rule_labels(plan.rules) for plan in plans} - {""}
    if labels - {*ULYSSES_RULES}:
        return {"rules": [plan.rule_set for plan in plans]}
    return {"cp form": [ULYSSES if plan.rule_set in labels else "-" for plan in plans]} if labels else {}


def baselines_table(result: SearchResult) -> Table:
    """Return the table of the baselines, including slower and non-fitting ones."""
    best = result.plans[0].step_time if result.plans else 0.0
    shown = [baseline.prediction[0] for baseline in result.baselines if baseline.prediction]
    step, size = times_like(min((prediction.step_time for prediction in shown), default=1.0)), bytes_like(result.memory.usable)
    unit = size(result.memory.usable).rpartition(" ")[2]
    results = ("step time", "vs 1", "MFU", unit, PROBABILITY)
    rows = []
    for baseline in result.baselines:
        if baseline.prediction:
            prediction = baseline.prediction[0]
            name, cells = f"{baseline.name}{_MARK if prediction.not_runnable else ''}", _result_cells(prediction, best, step, size)
            rows.append({"baseline": name} | cells | {"plan": short_plan_text(prediction.plan)})
        else:
            rows.append({"baseline": baseline.name} | dict.fromkeys(results, "-") | {"plan": f"no such plan: {baseline.reason}"})
    return table_of_rows("Without a search", rows, right=results, fold=("plan",), optional=("MFU", "vs 1"))


def _result_cells(prediction: Prediction, best: float, step: Callable[[float], str], size: Callable[[float], str]) -> dict[str, str]:
    """Return the results of a plan as cells by header. best: step time of the first plan [s]."""
    memory, _, unit = size(prediction.memory["total"]).rpartition(" ")
    return {
        "step time": step(prediction.step_time),
        "vs 1": _relative_to_best(prediction.step_time, best),
        "MFU": percent(prediction.mfu_palm),
        unit: memory,
        PROBABILITY: probability_cell(prediction.fits_probability),
    }


def other_lines(result: SearchResult) -> list[str]:
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


def ties_line(result: SearchResult) -> str:
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
    least = "" if by_memory else f" (the least time of any plan that fits is {format_step(result.least_time)})"
    return (
        f"plans within {percent(result.ranking.ties)} tie (--ties): plan 1 {first} the fewest "
        f"forms of parallelism, then the least {'time' if by_memory else 'memory'}{least}"
    )


def _named_plans(result: SearchResult) -> list[tuple[str, Prediction]]:
    """Return the best plans by number, then the baselines by name."""
    best = [(str(number), kind.prediction) for number, kind in enumerate(result.ranking.kinds, 1)]
    return best + [(baseline.name, baseline.prediction[0]) for baseline in result.baselines if baseline.prediction]


def not_runnable_lines(result: SearchResult) -> list[str]:
    """Return the footnotes of plans that the assumed framework cannot run, one per reason."""
    names: dict[str, list[str]] = {}
    for name, prediction in _named_plans(result):
        if prediction.not_runnable:
            names.setdefault(f"not a plan for this framework: {prediction.not_runnable}", []).append(name)
    return [f"{_MARK} {', '.join(plans)}: {reason}" for reason, plans in names.items()]


def any_framework_line(result: SearchResult) -> str:
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


def search_notes(result: SearchResult) -> list[str]:
    """Return the notes on the tables, most important first."""
    table = plans_table(result)
    legend = "; ".join(f"{header}: {meaning}" for header, meaning in PLAN_LEGEND.items() if header in table.headers)
    return [
        line
        for line in (*not_runnable_lines(result), any_framework_line(result), ties_line(result), legend if result.plans else "")
        if line
    ]


def search_details(result: SearchResult) -> list[str]:
    """Return the `--verbose` notes: nearly equal plans and meanings of the baselines."""
    return [*other_lines(result), *baselines_lines(result)]


def baselines_lines(result: SearchResult) -> list[str]:
    """Return the meaning of each baseline."""
    return [f"{baseline.name}: {MEANINGS[baseline.name]}" for baseline in result.baselines if baseline.prediction]


def _relative_to_best(time: float, best: float) -> str:
    if not best or time == best:
        return "-"
    change = time / best - 1.0
    return f"{'+' if change > 0 else '-'}{percent(abs(change))}"


def rejected_table(result: SearchResult) -> Table:
    rows = [(f"{count:,}", "plans", reason) for reason, count in result.rejected.items()]
    rows += [(f"{count:,}", "layouts", reason) for reason, count in result.left_out.items()]
    return table_of("Rejected plans and layouts", ">count | of | ~reason", rows)


def nothing_fits_line(result: SearchResult, *, given: bool) -> str:
    """Return one sentence: least memory of any plan against the usable memory, and the remedies."""
    least = result.least_memory[0]
    remedies = list(map(_remedy_text, result.remedies))
    remedy = "; or ".join(remedies) or "use chips with more memory, a smaller model or shorter sequences"
    if given and not remedies:
        remedy += ", or free some of the knobs that were given"
    memory = result.memory
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
                _relative_to_best(prediction.step_time, step_time),
                size(prediction.memory["total"]),
                fits_cell(prediction.verdict),
                probability_cell(prediction.fits_probability),
            )
        rows.append((knobs_text({**neighbour.knobs, **neighbour.changed}), *cells, change))
    columns = f"~knob | >step time | >change | >memory | ?fits | >{PROBABILITY} | ~largest change"
    return table_of("One knob changed, with every other knob that has to follow", columns, rows)


def knobs_text(knobs: Mapping[str, int | str | bool]) -> str:
    return ", ".join(f"{knob}={str(value).lower()}" for knob, value in knobs.items())
