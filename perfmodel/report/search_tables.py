"""Searches as tables, of training plans and of plans of a service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_time
from perfmodel.parallel.algebra.rules import rule_labels
from perfmodel.parallel.choices import ULYSSES, ULYSSES_RULES
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import PROBABILITY, Prediction, probability_cell
from perfmodel.parallel.serving_plan import ServiceLayout, ServingLayout
from perfmodel.planner.result import Objective, RankedPlan, ServingSearch, TrainingSearch
from perfmodel.report.predictions import fits_cell, plan_cells, short_plan_text
from perfmodel.report.serving import cost_cell, load_cell, short_layout, time_cell
from perfmodel.report.table import Table, bytes_like, rate, table_of, table_of_rows, times_like, without_empty
from perfmodel.report.training_run import JOULES_OF_A_MEGAWATT_HOUR

#: Mark of the name of a plan that the assumed framework cannot run.
UNABLE_MARK = "*"


def certainty_table(result: TrainingSearch) -> Table:
    """Return the table of the fastest plan at each risk of running out of memory."""
    best = [certainty.prediction[0].step_time for certainty in result.certainty if certainty.prediction]
    step = times_like(min(best, default=1.0))
    rows: list[tuple[str, ...]] = []
    for certainty in result.certainty:
        cells: tuple[str, ...] = ("-", "-", "-", "none")
        for prediction in certainty.prediction:
            slower, share = relative_to_best(prediction.step_time, best[0]), probability_cell(prediction.fits_probability)
            cells = (step(prediction.step_time), slower, share, short_plan_text(prediction.plan))
        rows.append((percent(certainty.risk), *cells))
    columns = f">risk | >step time | >slower | >{PROBABILITY} | ~plan"
    return table_of("Fastest plan at each risk of running out of memory", columns, rows)


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


def plans_table(result: TrainingSearch) -> Table:
    """Return the table of the best plans, one row per group of nearly equal plans.

    Only knobs that differ have a column; the caption lists the others. Columns that repeat information of others are on wide pages only.
    """
    best = result.plans[0].step_time if result.plans else 0.0
    kinds = result.ranking.kinds
    shown = [kind.prediction for kind in kinds]
    step, size = times_like(min((prediction.step_time for prediction in shown), default=1.0)), bytes_like(result.conditions.usable)
    positions = [kind.position for kind in kinds]
    ranks = []  # `1-3` for the first three of a tie
    for position in positions:
        first, tied = positions.index(position) + 1, positions.count(position)
        ranks.append(f"{first}-{first + tied - 1}" if tied > 1 else str(first))
    cuts = _cut_cells([prediction.plan for prediction in shown])
    unit = size(result.conditions.usable).rpartition(" ")[2]
    of_run = value_cells(result.objective, [kind.value for kind in kinds if kind.value is not None])
    rows, knobs = [], []
    for index, (rank, prediction) in enumerate(zip(ranks, shown, strict=True)):
        knobs.append(plan_cells(prediction.plan) | {header: cells[index] for header, cells in cuts.items()})
        rows.append(
            {"plan": f"{index + 1}{UNABLE_MARK if prediction.not_runnable else ''}"}
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


def baselines_table(result: TrainingSearch) -> Table:
    """Return the table of the baselines, including slower and non-fitting ones."""
    best = result.plans[0].step_time if result.plans else 0.0
    shown = [baseline.plans[0] for baseline in result.baselines if baseline.plans]
    step, size = times_like(min((prediction.step_time for prediction in shown), default=1.0)), bytes_like(result.conditions.usable)
    unit = size(result.conditions.usable).rpartition(" ")[2]
    results = ("step time", "vs 1", "MFU", unit, PROBABILITY)
    rows = []
    for baseline in result.baselines:
        if baseline.plans:
            prediction = baseline.plans[0]
            name, cells = f"{baseline.name}{UNABLE_MARK if prediction.not_runnable else ''}", _result_cells(prediction, best, step, size)
            rows.append({"baseline": name} | cells | {"plan": short_plan_text(prediction.plan)})
        else:
            rows.append({"baseline": baseline.name} | dict.fromkeys(results, "-") | {"plan": f"no such plan: {baseline.reason}"})
    return table_of_rows("Without a search", rows, right=results, fold=("plan",), optional=("MFU", "vs 1"))


def _result_cells(prediction: Prediction, best: float, step: Callable[[float], str], size: Callable[[float], str]) -> dict[str, str]:
    """Return the results of a plan as cells by header. best: step time of the first plan [s]."""
    memory, _, unit = size(prediction.memory["total"]).rpartition(" ")
    return {
        "step time": step(prediction.step_time),
        "vs 1": relative_to_best(prediction.step_time, best),
        "MFU": percent(prediction.mfu_palm),
        unit: memory,
        PROBABILITY: probability_cell(prediction.fits_probability),
    }


def relative_to_best(time: float, best: float) -> str:
    if not best or time == best:
        return "-"
    change = time / best - 1.0
    return f"{'+' if change > 0 else '-'}{percent(abs(change))}"


def rejected_table(result: TrainingSearch) -> Table:
    rows = [(f"{count:,}", "plans", reason) for reason, count in result.rejected.items()]
    rows += [(f"{count:,}", "layouts", reason) for reason, count in result.left_out.items()]
    return table_of("Rejected plans and layouts", ">count | of | ~reason", rows)


#: Most printed points of the Pareto front.
_SHOWN = 12


def service_plans_table(result: ServingSearch) -> Table:
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
    table = table_of("Plans, best first", f"> | ~plan | weights | {_FIGURES}", rows)
    return without_empty(replace(table, optional=("USD/M", "weights")))


#: Columns of `_figures`.
_FIGURES = ">in flight | >tok/s/chip | >tok/s/user | >TTFT | >TPOT | >USD/M"


def _layout_text(layout: ServiceLayout, result: ServingSearch) -> str:
    """Return a layout for a table column, with its limit of batched tokens if the plans differ in it."""
    tokens = _max_tokens(layout)
    return short_layout(layout) + (f", {tokens:,} batched" if tokens and budgets_differ(result) else "")


def budgets_differ(result: ServingSearch) -> bool:
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


def pools_tables(result: ServingSearch) -> list[Table]:
    """Return tables of disaggregated plans against the best aggregated plan: figures, then plans."""
    title = "Disaggregated: prefill and decode workers" + ("" if result.disaggregated else ": none meets the limits")
    figures, named = [], []
    for rank, ranked in enumerate(result.disaggregated, 1):
        figures.append((str(rank), ranked.prediction.job.quantization.name, *_figures(ranked), ranked.reason))
        named.append((str(rank), f"{ranked.plan.label()}{f', {ranked.idle_chips} idle' if ranked.idle_chips else ''}"))
    first = without_empty(table_of(title, f"> | weights | {_FIGURES} | ~against the best aggregated", figures))
    return [first, table_of("", "> | ~plan", named)] if named else [first]


def service_baselines_table(result: ServingSearch) -> Table:
    """Return the table of baselines."""
    rows: list[tuple[str, ...]] = []
    for baseline in result.baselines:
        if not baseline.plans:
            rows.append((baseline.name, "none", *("",) * 6))
            continue
        ranked = baseline.plans[0]
        plan, fits = _layout_text(ranked.plan.layout, result), ranked.prediction.fits
        rows.append((baseline.name, plan, *_figures(ranked)) if fits else (baseline.name, f"{plan}: does not fit", *("",) * 6))
    table = table_of("Without a search", f"baseline | ~plan | {_FIGURES}", rows)
    return without_empty(replace(table, optional=("USD/M", "tok/s/user")))


def front_table(result: ServingSearch) -> Table:
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


def service_tables(result: ServingSearch, *, with_pools: bool) -> list[Table]:
    """Return the tables of best plans, disaggregated plans, baselines and Pareto front.

    with_pools   include disaggregated plans, if aggregated ones are feasible
    """
    pools = pools_tables(result) if with_pools and result.num_feasible else []
    return [service_plans_table(result), *pools, service_baselines_table(result), front_table(result)]
