"""HTML pages of services and serving searches, from the blocks of `perfmodel serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from perfmodel.cost.serving.boundness import OperatorRow
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.hardware.chip_cluster import chips_text, short_name
from perfmodel.parallel.interval import COVERAGE
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.planner.serving.result import ServingSearchResult
from perfmodel.report.document import Block, Command, Facts, Notes, Text
from perfmodel.report.figures import MEMORY_COLOURS
from perfmodel.report.html import Bar, Part, bars
from perfmodel.report.page import Report, Sections, make_report
from perfmodel.report.serving import memory_table, operators_table, parts_table, service_facts, short_plan, shown_notes, verdict_line
from perfmodel.report.serving_searches import best_line, search_details, search_facts, search_notes, search_tables
from perfmodel.report.svg import Mark, scatter
from perfmodel.report.table import Table, times_like, words

_PART_COLOURS = {
    "products": "#0072B2",
    "attention": "#E69F00",
    "communication": "#D55E00",
    "experts": "#56B4E9",
    "logits": "#009E73",
    "passes": "#7DCEA0",
    "host": "#555555",
}
_MEMORY_COLOURS = {**MEMORY_COLOURS, "cache": "#CC79A7", "graphs": "#B07AA1", "context": "#555555"}
_FRONT_COLOURS = {"best plan": "#D55E00", "without a search": "#009E73", "keeps the limits": "#0072B2", "breaks a limit": "#999999"}


def service_report(
    prediction: ServingPrediction,
    *,
    limits: Mapping[str, float],
    operators: Sequence[OperatorRow],
    start: Sequence[Block],
    command: str,
    sources: Table,
    result: ServingSearchResult | None = None,
    more_notes: Sequence[str] = (),
) -> Report:
    """Return the page of a service, or of a search and its best plan.

    operators   operators of a decode step and of a prefill; empty for separate prefill and decode workers
    start       launch commands of the plan
    command     command line that reproduces the numbers
    sources     sources of the records behind the numbers
    """
    sections: Sections = {"Summary": [Facts("", service_facts(prediction, limits, verbose=True)), Notes(shown_notes(prediction))]}
    if result is not None:
        searched = [Facts("The search", search_facts(result)), Notes([*search_notes(result), *more_notes])]
        sections["Summary"] = [*sections["Summary"], *searched]
    if prediction.fits:
        text = times_like(prediction.decode_step)
        times = bars([Bar("", prediction.parts, text(prediction.decode_step))], _PART_COLOURS, text)
        sections["Where a decode step goes"] = [times, parts_table(prediction)]
    total = f"{format_bytes(prediction.memory['total'])} of {format_bytes(prediction.memory_usable)} usable"
    memory = bars([Bar("", prediction.memory, total, prediction.memory_usable)], _MEMORY_COLOURS, format_bytes)
    sections["Memory"] = [memory, memory_table(prediction)]
    if operators:
        sections["Operators"] = [operators_table(operators, phase) for phase in ("decode", "prefill")]
    if result is not None:
        sections["Best plans"] = _search_parts(result)
    if start:
        sections["Start"] = start
    basis = tuple((words(name), source) for name, source in prediction.rests_on.items())
    sections["Assumptions and sources"] = [
        Table(title="Basis of the numbers", headers=("part", "based on"), rows=basis, fold=("based on",)),
        sources,
    ]
    sections["Reproduce"] = [Command(command)]
    title = f"{prediction.job.model.name} served on {chips_text(prediction.plan.num_chips)} of {short_name(prediction.cluster)}"
    kind, verdict = ("service", verdict_line(prediction, limits)) if result is None else ("service search", best_line(result))
    return make_report(kind, title, verdict, _cards(prediction) if prediction.fits else (), sections)


def _cards(prediction: ServingPrediction) -> Iterator[tuple[str, str, str]]:
    for label, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("latency", "request_latency")):
        low, high = prediction.intervals.get(name, (0.0, 0.0))
        bounds = f"{COVERAGE:.0%} interval {format_time(low)} to {format_time(high)}" if high else ""
        yield label, format_time(getattr(prediction, name).mean), bounds
    yield "throughput", f"{prediction.tokens_per_second_per_chip:,.0f}", "output tokens/s a chip"
    yield "for a user", f"{prediction.tokens_per_second_per_user:,.1f}", "tokens/s"
    yield "memory", format_bytes(prediction.memory["total"]), f"of {format_bytes(prediction.memory_usable)} usable"
    if prediction.cost_per_million is not None:
        yield "cost", f"{prediction.cost_per_million:,.2f} USD", "a million output tokens"


def _search_parts(result: ServingSearchResult) -> Iterator[Part]:
    marks = []
    for point in result.pareto:
        kind = "keeps the limits" if point.meets else "breaks a limit"
        text = f"{short_plan(point.plan)}, {point.quantization}, {point.concurrency:,} in flight\n{_times(point.ttft, point.tpot)}"
        marks.append(Mark(point.tokens_per_second_per_user, point.tokens_per_second_per_chip, kind, text, is_front=True))
    ranked = [("best plan", "best plan", result.best)]
    ranked += [("without a search", baseline.name, plan) for baseline in result.baselines for plan in baseline.plans]
    for kind, name, plan in ranked:
        prediction = plan.prediction
        text = f"{name}: {short_plan(plan.plan)}\n{_times(prediction.ttft.mean, prediction.tpot.mean)}"
        marks.append(Mark(prediction.tokens_per_second_per_user, plan.tokens_per_second_per_chip, kind, text))
    limit = 1.0 / result.limits.tpot if result.limits.tpot else 0.0
    yield Text("Tokens that a user sees against tokens of a chip; the line joins the plans and loads that no other beats in both.")
    labels = {"x_label": "output tokens/s for a user", "y_label": "output tokens/s a chip"}
    yield scatter(marks, _FRONT_COLOURS, limit=limit, limit_text="TPOT limit", is_whole=True, **labels)
    yield from search_tables(result, with_pools=bool(result.disaggregated))
    yield Notes(search_details(result))


def _times(ttft: float, tpot: float) -> str:
    return f"TTFT {format_time(ttft)}, TPOT {format_time(tpot)}"
