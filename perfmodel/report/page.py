"""HTML pages of plans, searches, comparisons and services, from the blocks of the command line and figures of the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Any, TypeAlias

from perfmodel.cost.serving.boundness import OperatorRow
from perfmodel.cost.trace import RankTimeline
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.plain import picked
from perfmodel.foundation.text import percent
from perfmodel.foundation.units import format_bandwidth, format_bytes, format_count, format_flop_rate, format_step, format_time
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.cluster_text import chips_text, short_name
from perfmodel.parallel.interval import COVERAGE, StepInterval
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction, notes
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.planner.explain import Explanation
from perfmodel.planner.result import ServingSearch, TrainingSearch
from perfmodel.report import predictions, search_tables, searches, serving
from perfmodel.report.advice import fitting_changes_table
from perfmodel.report.document import Block, Command, Facts, Notes, Text
from perfmodel.report.figures import GIB, MARK_COLOURS, MEMORY_COLOURS, PART_COLOURS, PASS_COLOURS, SERVING_COLOURS, time_scale
from perfmodel.report.html import PAGE, SCRIPT, STYLE, Bar, Mark, Markup, Part, anchor, area, bars, legend, scatter, schedule, section_html
from perfmodel.report.table import Table, bytes_like, table_of, times_like, words
from perfmodel.report.trace import peak_memory
from perfmodel.report.trust import remedies_table, trust_lines, uncertainty_table
from perfmodel.workload.config import TransformerConfig

#: Most passes in a schedule figure; longer schedules are drawn as two windows, at the start and the end.
_MOST_PASSES = 3_000
_UNFIT = "does not fit"

#: Parts of each section of a page, by its title, in order.
Sections: TypeAlias = dict[str, Iterable[Part]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Report:
    """An HTML page.

    kind       plan, search, comparison, service or service search
    sections   titles of the sections, in order
    """

    kind: str
    title: str
    verdict: str
    sections: tuple[str, ...]
    html: str

    def __repr__(self) -> str:
        return f"{self.title}: {self.verdict}\n{', '.join(self.sections)}"


def report_object(report: Report, file: str) -> dict[str, Any]:
    return {"file": file, "num_bytes": len(report.html.encode()), **picked(report, "kind title verdict sections")}


def report_blocks(report: Report, file: str) -> Iterator[Block]:
    facts = [("verdict", report.verdict), ("sections", ", ".join(report.sections).lower())]
    yield Facts(report.title, [*facts, ("written", f"{file} ({format_bytes(len(report.html.encode()))})")])


def plan_report(
    explanation: Explanation,
    timelines: Sequence[RankTimeline],
    *,
    sources: Table,
    plan_text: str,
    commands: Sequence[str],
    result: TrainingSearch | None = None,
) -> Report:
    """Return the page of a plan, or of a search and its best plan.

    explanation   of the plan; with `result`, its prediction is replaced by that of the best plan
    commands      command lines that reproduce the numbers
    """
    prediction = explanation.prediction if result is None else result.plans[0]
    plan, trust, step = prediction.plan, explanation.trust, prediction.step_time
    summary = predictions.headline(prediction, verbose=True)
    if trust is not None:
        summary += predictions.confidence_lines(prediction, trust.interval)
    if result is not None:
        summary.append(("search", searches.search_line(result)))
    sections: Sections = {
        "Summary": [Facts("", summary), Notes(notes(prediction))],
        "Where the time goes": [_time_bars({"": prediction}), predictions.parts_table(prediction)],
        "Memory": _memory_parts(prediction, timelines),
    }
    if plan.layout.pp > 1 and timelines:
        sections["Pipeline schedule"] = _schedule_parts(plan, timelines)
    if result is not None:
        sections["Best plans"] = _search_parts(result)
    sections["Why not another plan"] = _alternative_parts(prediction, explanation)
    if trust is not None:
        tables = [uncertainty_table(trust), *([remedies_table(trust, step)] if trust.remedies else [])]
        sections["Uncertainty"] = [Facts("", trust_lines(trust, step)), *tables]
    sections["Assumptions and sources"] = [_basis_table({"": prediction}), sources]
    sections["Reproduce"] = _reproduce_parts(commands, {"plan.yaml": plan_text})
    title = f"{plan.job.model.name} on {chips_text(plan.num_chips)} of {short_name(plan.cluster)}"
    cards = _cards(prediction, None if trust is None else trust.interval)
    return make_report("plan" if result is None else "search", title, predictions.verdict_line(prediction), cards, sections)


def comparison_report(plans: Mapping[str, Prediction], *, texts: Sequence[str], commands: Sequence[str]) -> Report:
    """Return the page of plans side by side.

    plans   by name
    texts         plan files
    """
    names, compared = list(plans), list(plans.values())
    results, parts, memory, *knobs = predictions.comparison_tables(names, compared)
    unlike = [] if predictions.is_one_job(compared) else ["these plans run different jobs: compare tokens/s a chip, not step times"]
    marks = [_mark(prediction, "plan" if prediction.fits else _UNFIT, name) for name, prediction in plans.items()]
    facts = [Facts(f"{name}: {predictions.verdict_line(plan)}", predictions.headline(plan, verbose=True)) for name, plan in plans.items()]
    all_notes = dict.fromkeys(f"{name}: {note}" for name, prediction in plans.items() for note in notes(prediction))
    sections: Sections = {
        "Summary": [results, Notes(unlike)],
        "Where the time goes": [_time_bars(plans), parts],
        "Memory": [_memory_bars(plans), memory],
        "Time against memory": [_scatter(marks, compared[0])],
        "Plans": [*knobs, *facts],
        "Assumptions and sources": [_basis_table(plans), Notes(list(all_notes))],
        "Reproduce": _reproduce_parts(commands, {f"{name}.yaml": text for name, text in zip(names, texts, strict=True)}),
    }
    cards = [(name, format_step(plan.step_time), predictions.memory_line(plan).partition(": ")[2]) for name, plan in plans.items()]
    return make_report("comparison", f"{len(names)} plans", predictions.comparison_verdict(names, compared), cards, sections)


def make_report(kind: str, title: str, verdict: str, cards: Iterable[tuple[str, str, str]], sections: Sections) -> Report:
    """Return the page.

    cards   (name, number, remark) of each headline figure
    """
    from perfmodel import __version__

    boxes = (f"<div><span>{escape(name)}</span><b>{escape(number)}</b><small>{escape(more)}</small></div>" for name, number, more in cards)
    html = Template(PAGE).substitute(
        style=STYLE,
        script=SCRIPT,
        title=escape(title),
        verdict=escape(verdict),
        cards="\n".join(boxes),
        links="\n".join(f'<a href="#{anchor(section)}">{escape(section)}</a>' for section in sections),
        body="\n".join(section_html(section, parts) for section, parts in sections.items()),
        made_by=f"perfmodel {escape(__version__)}",
    )
    return Report(kind=kind, title=title, verdict=verdict, sections=tuple(sections), html=html)


def _cards(prediction: Prediction, interval: StepInterval | None) -> Iterator[tuple[str, str, str]]:
    low, high = ("", "") if interval is None else (format_step(prediction.step_time * factor) for factor in (interval.low, interval.high))
    bounds = f"{COVERAGE:.0%} interval {low} to {high}" if low else ""
    yield "step time", format_step(prediction.step_time), bounds
    yield "throughput", f"{prediction.tokens_per_second_per_chip:,.0f}", f"{prediction.plan.job.unit}/s a chip"
    yield "MFU", percent(prediction.mfu_palm), f"of {format_flop_rate(prediction.peak_flop_rate)} dense {prediction.conditions.peak_dtype}"
    verdict = predictions.memory_line(prediction).partition(": ")[2]
    yield "memory", format_bytes(prediction.memory["total"]), f"of {format_bytes(prediction.memory_usable)} usable: {verdict}"
    yield "", predictions.probability_text(prediction.fits_probability), "probability that it fits"


# --- time and memory ------------------------------------------------------------------------------------------------


def _time_bars(plans: Mapping[str, Prediction]) -> Markup:
    text = times_like(min(prediction.step_time for prediction in plans.values()))
    rows = [Bar(name, prediction.parts, text(prediction.step_time)) for name, prediction in plans.items()]
    return bars(rows, PART_COLOURS, text, with_shares=True)


def _memory_bars(
    plans: Mapping[str, Prediction | ServingPrediction],
    colours: Mapping[str, str] = MEMORY_COLOURS,
    text: Callable[[float], str] | None = None,
) -> Markup:
    text = text or bytes_like(next(iter(plans.values())).memory_usable)
    totals = {name: f"{text(plan.memory['total'])} of {text(plan.memory_usable)} usable" for name, plan in plans.items()}
    return bars([Bar(name, plan.memory, totals[name], plan.memory_usable) for name, plan in plans.items()], colours, text)


def _memory_parts(prediction: Prediction, timelines: Sequence[RankTimeline]) -> Iterator[Part]:
    yield _memory_bars({"": prediction})
    yield predictions.memory_table(prediction)
    if timelines:
        fullest = max(timelines, key=peak_memory)
        scale, unit = time_scale(prediction.step_time)
        points = [(time * scale, {name: size / GIB for name, size in classes.items()}) for time, classes in fullest.memory]
        yield Facts(f"Over the step, rank {fullest.rank} of stage {fullest.stage}", [])
        yield area(points, MEMORY_COLOURS, limit=prediction.memory_usable / GIB, x_label=f"time [{unit}]", y_label="memory [GiB]")
        yield Text("Temporary buffers and gathered parameters are drawn at the peak only.")


def _schedule_parts(plan: Plan, timelines: Sequence[RankTimeline]) -> Iterator[Part]:
    step_time = timelines[0].step_time
    scale, unit = time_scale(step_time)
    number, end = sum(len(timeline.passes) for timeline in timelines), step_time * scale
    width = end * _MOST_PASSES / 2 / number
    windows = [(0.0, end)] if number <= _MOST_PASSES else [(0.0, width), (end - width, end)]
    cut = "; the begin and the end of the step" if len(windows) > 1 else ""
    yield Text(f"{predictions.schedule_text(plan)}, {plan.num_microbatches:,} micro-batches{cut}")
    for first, last in windows:
        yield schedule(timelines, PASS_COLOURS, start=first, end=last, scale=scale, unit=unit)
    yield Markup(legend(tuple(dict.fromkeys(span.part for span in timelines[-1].passes)), PASS_COLOURS))
    text, idle = times_like(step_time), {timeline.stage: timeline.parts.get("pipeline_bubble", 0.0) for timeline in timelines}
    rows = ((str(stage), text(bubble), percent(bubble / step_time)) for stage, bubble in idle.items())
    yield table_of("Idle time", "stage | >bubble | >share", rows)


# --- other plans ----------------------------------------------------------------------------------------------------


def _mark(prediction: Prediction, kind: str, name: str = "", text: str = "", *, is_front: bool = False) -> Mark:
    """Return the mark of a plan. text: in place of the plan's knobs."""
    first = f"{name}{': ' if name else ''}{text or predictions.short_plan_text(prediction.plan)}"
    time, memory = format_step(prediction.step_time), format_bytes(prediction.memory["total"])
    facts = f"{time}, {memory}, {predictions.fits_text(prediction.fits_probability)}"
    return Mark(prediction.memory["total"] / GIB, prediction.step_time, kind, f"{first}\n{facts}", is_front)


def _scatter(marks: Sequence[Mark], like: Prediction) -> Markup:
    return scatter(marks, MARK_COLOURS, ("peak memory of a chip [GiB]", "step time [s]"), limit=like.memory_usable / GIB)


def _search_parts(result: TrainingSearch) -> Iterator[Part]:
    kinds = [(f"plan {i}", kind.prediction) for i, kind in enumerate(result.ranking.kinds, 1)]  # numbered as in the table
    baselines = [(baseline.name, prediction) for baseline in result.baselines for prediction in baseline.plans]
    marks = [_mark(prediction, "plan 1" if name == "plan 1" else "best plans", name) for name, prediction in kinds]
    marks += [_mark(prediction, "Pareto front", is_front=True) for prediction in result.pareto]
    marks += [_mark(prediction, "without a search" if prediction.fits else _UNFIT, name) for name, prediction in baselines]
    yield _scatter(marks, kinds[0][1])
    yield search_tables.plans_table(result)
    if result.baselines:
        yield search_tables.baselines_table(result)
    if any(certainty.prediction for certainty in result.certainty):
        yield search_tables.certainty_table(result)
    yield Notes([*searches.search_notes(result), *searches.search_details(result)])
    yield search_tables.rejected_table(result)


def _alternative_parts(prediction: Prediction, explanation: Explanation) -> Iterator[Part]:
    marks = [_mark(prediction, "this plan", "this plan")]
    for neighbour in explanation.neighbours:
        knobs = searches.knobs_text({**neighbour.knobs, **neighbour.changed})
        marks += [_mark(other, "one knob changed" if other.fits else _UNFIT, text=knobs) for other in neighbour.prediction]
    yield _scatter(marks, prediction)
    if explanation.neighbours:
        yield searches.neighbours_table(explanation)
    if explanation.remedies:
        yield fitting_changes_table(explanation.remedies)


# --- sources --------------------------------------------------------------------------------------------------------


def _basis_table(plans: Mapping[str, Prediction]) -> Table:
    """Return the table of the basis of each part of the step time, per plan."""
    rows = ((name, line) for name, plan in plans.items() for line in predictions.basis_lines(plan))
    return table_of("Basis of the times", "plan | ~based on", rows)


def sources_table(
    model: Any, cluster: Cluster, calibrations: Sequence[Calibration], peak: tuple[float, str], runs: tuple[str, str, str]
) -> Table:
    """Return the records behind a prediction, and the sources of their numbers.

    calibrations   of each kind of chips
    peak           rate [FLOP/s] and its dtype; of several kinds of chips the mean
    runs           row of the framework or engine: (record, name, source)
    """
    is_config = isinstance(model, TransformerConfig)
    size = f", {format_count(model.num_parameters)} parameters" if is_config else ""
    rows = [("model", f"{model.name}{size}", model.origin.source if is_config else "")]
    for pool, calibration in zip(cluster.pools or (cluster,), calibrations, strict=True):
        chip, number = pool.chip, f"{pool.num_chips} of " if cluster.pools else ""
        flop_rate = chip.peak_flop_rate.get(Dtype(peak[1]), 0.0) if cluster.pools else peak[0]
        memory = f"{format_bytes(chip.memory.capacity)}, {format_bandwidth(chip.memory.bandwidth)}"
        rows.append(("chip", f"{chip.name}: {format_flop_rate(flop_rate)} dense {peak[1]}, {memory}", chip.source))
        rows.append(("cluster", f"{number}{short_name(pool.name)}", pool.source))
        for tier in pool.tiers:
            link = f"{format_bandwidth(tier.link.bandwidth)}, {format_time(tier.link.latency)}"
            rows.append((f"network {tier.name}", f"{tier.size:,} chips, {link}", tier.source))
        rows.append(("kernels", calibration.name or "spec sheet", calibration.source))
    return table_of("Sources", "record | ~value | ~source", (*rows, runs))


def _reproduce_parts(commands: Sequence[str], files: Mapping[str, str]) -> list[Part]:
    """Return commands to copy, and files that expand on a click on their name."""
    folded = (f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>" for name, text in files.items())
    return [*map(Command, commands), *map(Markup, folded)]


# --- services --------------------------------------------------------------------------------------------------------


def service_report(
    prediction: ServingPrediction,
    *,
    limits: Mapping[str, float],
    operators: Sequence[OperatorRow],
    start: Sequence[Block],
    command: str,
    sources: Table,
    result: ServingSearch | None = None,
    more_notes: Sequence[str] = (),
) -> Report:
    """Return the page of a service, or of a search and its best plan.

    operators   operators of a decode step and of a prefill; empty for separate prefill and decode workers
    start       launch commands of the plan
    command     command line that reproduces the numbers
    sources     sources of the records behind the numbers
    """
    summary: list[Part] = [Facts("", serving.service_facts(prediction, limits, verbose=True)), Notes(serving.shown_notes(prediction))]
    if result is not None:
        summary.append(Facts("The search", searches.service_search_facts(result)))
        summary.append(Notes([*searches.service_search_notes(result), *more_notes]))
    sections: Sections = {"Summary": summary}
    if prediction.fits:
        text = times_like(prediction.decode_step)
        times = bars([Bar("", prediction.parts, text(prediction.decode_step))], SERVING_COLOURS, text)
        sections["Where a decode step goes"] = [times, serving.parts_table(prediction)]
    sections["Memory"] = [_memory_bars({"": prediction}, SERVING_COLOURS, format_bytes), serving.memory_table(prediction)]
    if operators:
        sections["Operators"] = [serving.operators_table(operators, phase) for phase in ("decode", "prefill")]
    if result is not None:
        sections["Best plans"] = _service_search_parts(result)
    if start:
        sections["Start"] = start
    basis = ((words(name), source) for name, source in prediction.rests_on.items())
    sections["Assumptions and sources"] = [table_of("Basis of the numbers", "part | ~based on", basis), sources]
    sections["Reproduce"] = [Command(command)]
    title = f"{prediction.job.model.name} served on {chips_text(prediction.plan.num_chips)} of {short_name(prediction.cluster)}"
    verdict = serving.verdict_line(prediction, limits) if result is None else searches.best_line(result)
    cards = _service_cards(prediction) if prediction.fits else ()
    return make_report("service" if result is None else "service search", title, verdict, cards, sections)


def _service_cards(prediction: ServingPrediction) -> Iterator[tuple[str, str, str]]:
    for label, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("latency", "request_latency")):
        low, high = prediction.intervals.get(name, (0.0, 0.0))
        bounds = f"{COVERAGE:.0%} interval {format_time(low)} to {format_time(high)}" if high else ""
        yield label, format_time(getattr(prediction, name).mean), bounds
    yield "throughput", f"{prediction.tokens_per_second_per_chip:,.0f}", "output tokens/s a chip"
    yield "for a user", f"{prediction.tokens_per_second_per_user:,.1f}", "tokens/s"
    yield "memory", format_bytes(prediction.memory["total"]), f"of {format_bytes(prediction.memory_usable)} usable"
    if prediction.costs.cost_per_million is not None:
        yield "cost", f"{prediction.costs.cost_per_million:,.2f} USD", "a million output tokens"


def _service_search_parts(result: ServingSearch) -> Iterator[Part]:
    marks = []
    for point in result.pareto:
        kind = "keeps the limits" if point.meets else "breaks a limit"
        label = f"{serving.short_layout(point.layout)}, {point.quantization}"
        text = f"{label}, {point.concurrency:,} in flight\n{_times(point.ttft, point.tpot)}"
        marks.append(Mark(point.tokens_per_second_per_user, point.tokens_per_second_per_chip, kind, text, is_front=True))
    ranked = [("best plan", "best plan", result.best)]
    ranked += [("without a search", baseline.name, plan) for baseline in result.baselines for plan in baseline.plans]
    for kind, name, plan in ranked:
        prediction = plan.prediction
        text = f"{name}: {serving.short_layout(plan.plan.layout)}\n{_times(prediction.ttft.mean, prediction.tpot.mean)}"
        marks.append(Mark(prediction.tokens_per_second_per_user, plan.tokens_per_second_per_chip, kind, text))
    limit = 1.0 / result.conditions.limits.tpot if result.conditions.limits.tpot else 0.0
    yield Text("Tokens that a user sees against tokens of a chip; the line joins the plans and loads that no other beats in both.")
    labels = ("output tokens/s for a user", "output tokens/s a chip")
    yield scatter(marks, MARK_COLOURS, labels, limit=limit, limit_text="TPOT limit", is_whole=True)
    yield from search_tables.service_tables(result, with_pools=bool(result.disaggregated))
    yield Notes(searches.service_search_details(result))


def _times(ttft: float, tpot: float) -> str:
    return f"TTFT {format_time(ttft)}, TPOT {format_time(tpot)}"
