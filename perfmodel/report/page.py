"""HTML pages of plans, searches and comparisons, from the blocks of the command line and figures of the same results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Any

from perfmodel.cost.trace import RankTimeline
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.units import format_bandwidth, format_bytes, format_count, format_flop_rate, format_step, format_time
from perfmodel.hardware.calibration import Calibration
from perfmodel.hardware.chip_cluster import chips_text, short_name
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.interval import COVERAGE, StepInterval
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction, notes
from perfmodel.planner.explain import Explanation
from perfmodel.planner.result import SearchResult
from perfmodel.report.document import Block, Command, Facts, Notes, Text
from perfmodel.report.figures import GIB, MEMORY_COLOURS, PART_COLOURS, time_scale
from perfmodel.report.html import PAGE, SCRIPT, STYLE, Bar, Markup, PageSection, Part, bars, folded, legend
from perfmodel.report.predictions import (
    basis_lines,
    comparison_tables,
    comparison_verdict,
    confidence_lines,
    fits_text,
    headline,
    is_one_job,
    memory_line,
    memory_table,
    parts_table,
    schedule_text,
    short_plan_text,
    verdict_line,
)
from perfmodel.report.remedies import fitting_changes_table
from perfmodel.report.searches import (
    baselines_table,
    certainty_table,
    knobs_text,
    neighbours_table,
    plans_table,
    rejected_table,
    search_details,
    search_line,
    search_notes,
)
from perfmodel.report.svg import Mark, area, scatter, schedule
from perfmodel.report.table import Table, bytes_like, percent, times_like
from perfmodel.report.trace import peak_memory
from perfmodel.report.trust import remedies_table, trust_lines, uncertainty_table

#: Most passes in a schedule figure; longer schedules are drawn as two windows, at the start and the end.
_MOST_PASSES = 3_000
_BEST, _FRONT, _OTHERS, _NO_FIT = "#D55E00", "#0072B2", "#E69F00", "#999999"


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
    names = ("kind", "title", "verdict", "sections")
    return {"file": file, "num_bytes": len(report.html.encode()), **{name: getattr(report, name) for name in names}}


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
    result: SearchResult | None = None,
) -> Report:
    """Return the page of a plan, or of a search and its best plan.

    explanation   of the plan; with `result`, its prediction is replaced by that of the best plan
    commands      command lines that reproduce the numbers
    """
    prediction = explanation.prediction if result is None else result.plans[0]
    interval = explanation.trust.interval if explanation.trust is not None else None
    searched = [] if result is None else [("search", search_line(result))]
    confidence = confidence_lines(prediction, interval) if interval else []
    sections = [
        PageSection("Summary", [Facts("", [*headline(prediction, verbose=True), *confidence, *searched]), Notes(notes(prediction))]),
        PageSection("Where the time goes", [_time_bars({"": prediction}), parts_table(prediction)]),
        PageSection("Memory", list(_memory_parts(prediction, timelines))),
    ]
    if prediction.plan.layout.pp > 1 and timelines:
        sections.append(PageSection("Pipeline schedule", list(_schedule_parts(prediction.plan, timelines))))
    if result is not None:
        sections.append(PageSection("Best plans", list(_search_parts(result))))
    sections.append(PageSection("Why not another plan", list(_alternative_parts(prediction, explanation))))
    if explanation.trust is not None:
        trust, step = explanation.trust, prediction.step_time
        tables = [uncertainty_table(trust), *([remedies_table(trust, step)] if trust.remedies else [])]
        sections.append(PageSection("Uncertainty", [Facts("", trust_lines(trust, step)), *tables]))
    sections.append(PageSection("Assumptions and sources", [basis_table({"": prediction}), sources]))
    sections.append(_reproduce(commands, {"plan.yaml": plan_text}))
    plan, kind = prediction.plan, "plan" if result is None else "search"
    title = f"{plan.job.model.name} on {chips_text(plan.num_chips)} of {short_name(plan.cluster)}"
    return make_report(kind, title, verdict_line(prediction), _cards(prediction, interval), sections)


def comparison_report(predictions: Mapping[str, Prediction], *, texts: Sequence[str], commands: Sequence[str]) -> Report:
    """Return the page of plans side by side.

    predictions   by name
    texts         plan files
    """
    names, compared = list(predictions), list(predictions.values())
    results, parts, memory, *knobs = comparison_tables(names, compared)
    unlike = [] if is_one_job(compared) else ["these plans run different jobs: compare tokens/s a chip, not step times"]
    marks, facts, cards, all_notes = [], [], [], []
    for name, prediction in predictions.items():
        marks.append(_mark(prediction, "plan" if prediction.fits else "does not fit", f"{name}: {short_plan_text(prediction.plan)}"))
        facts.append(Facts(f"{name}: {verdict_line(prediction)}", headline(prediction, verbose=True)))
        cards.append((name, format_step(prediction.step_time), _memory_verdict(prediction)))
        all_notes += [f"{name}: {note}" for note in notes(prediction)]
    sections = [
        PageSection("Summary", [results, Notes(unlike)]),
        PageSection("Where the time goes", [_time_bars(predictions), parts]),
        PageSection("Memory", [_memory_bars(predictions), memory]),
        PageSection("Time against memory", [_scatter(marks, {"plan": _FRONT, "does not fit": _NO_FIT}, compared[0])]),
        PageSection("Plans", [*knobs, *facts]),
        PageSection("Assumptions and sources", [basis_table(predictions), Notes(list(dict.fromkeys(all_notes)))]),
        _reproduce(commands, {f"{name}.yaml": text for name, text in zip(names, texts, strict=True)}),
    ]
    return make_report("comparison", f"{len(names)} plans", comparison_verdict(names, compared), cards, sections)


def make_report(kind: str, title: str, verdict: str, cards: Sequence[tuple[str, str, str]], sections: Sequence[PageSection]) -> Report:
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
        links="\n".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in sections),
        body="\n".join(section.html() for section in sections),
        made_by=f"perfmodel {escape(__version__)}",
    )
    return Report(kind=kind, title=title, verdict=verdict, sections=tuple(section.title for section in sections), html=html)


def _memory_verdict(prediction: Prediction) -> str:
    return memory_line(prediction).partition(": ")[2]


def _cards(prediction: Prediction, interval: StepInterval | None) -> list[tuple[str, str, str]]:
    job = prediction.plan.job
    bounds = ""
    if interval is not None:
        low, high = (format_step(prediction.step_time * factor) for factor in (interval.low, interval.high))
        bounds = f"{COVERAGE:.0%} interval {low} to {high}"
    usable = format_bytes(prediction.memory_usable)
    return [
        ("step time", format_step(prediction.step_time), bounds),
        ("throughput", f"{prediction.tokens_per_second_per_chip:,.0f}", f"{job.unit}/s a chip"),
        ("MFU", percent(prediction.mfu_palm), f"of {format_flop_rate(prediction.peak_flop_rate)} dense {prediction.peak_dtype}"),
        ("memory", format_bytes(prediction.memory["total"]), f"of {usable} usable: {_memory_verdict(prediction)}"),
        ("", fits_text(prediction.fits_probability).rpartition(" fitting ")[2], "probability that it fits"),
    ]


# --- time and memory ------------------------------------------------------------------------------------------------


def _time_bars(predictions: Mapping[str, Prediction]) -> Markup:
    text = times_like(min(prediction.step_time for prediction in predictions.values()))
    rows = [Bar(name, prediction.parts, text(prediction.step_time)) for name, prediction in predictions.items()]
    return bars(rows, PART_COLOURS, text, with_shares=True)


def _memory_bars(predictions: Mapping[str, Prediction]) -> Markup:
    text = bytes_like(next(iter(predictions.values())).memory_usable)
    rows = []
    for name, prediction in predictions.items():
        total = f"{text(prediction.memory['total'])} of {text(prediction.memory_usable)} usable"
        rows.append(Bar(name, prediction.memory, total, prediction.memory_usable))
    return bars(rows, MEMORY_COLOURS, text)


def _memory_parts(prediction: Prediction, timelines: Sequence[RankTimeline]) -> Iterator[Part]:
    yield _memory_bars({"": prediction})
    yield memory_table(prediction)
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
    yield Text(f"{schedule_text(plan)}, {plan.num_microbatches:,} micro-batches{cut}")
    for first, last in windows:
        yield schedule(timelines, PART_COLOURS, start=first, end=last, scale=scale, unit=unit)
    yield Markup(legend(("forward", "backward"), PART_COLOURS))
    idle = [(timeline.stage, timeline.parts.get("pipeline_bubble", 0.0)) for timeline in timelines]
    text = times_like(step_time)
    rows = tuple((str(stage), text(bubble), percent(bubble / step_time)) for stage, bubble in idle)
    yield Table(title="Idle time", headers=("stage", "bubble", "share"), rows=rows, right=("bubble", "share"))


# --- other plans ----------------------------------------------------------------------------------------------------


def _mark(prediction: Prediction, kind: str, text: str, *, is_front: bool = False) -> Mark:
    facts = f"{format_step(prediction.step_time)}, {format_bytes(prediction.memory['total'])}, {fits_text(prediction.fits_probability)}"
    return Mark(prediction.memory["total"] / GIB, prediction.step_time, kind, f"{text}\n{facts}", is_front)


def _scatter(marks: Sequence[Mark], colours: Mapping[str, str], like: Prediction) -> Markup:
    return scatter(marks, colours, limit=like.memory_usable / GIB, x_label="peak memory of a chip [GiB]", y_label="step time [s]")


def _search_parts(result: SearchResult) -> Iterator[Part]:
    best, *others = (kind.prediction for kind in result.kinds)  # numbered as in the table
    marks = [_mark(best, "plan 1", f"plan 1: {short_plan_text(best.plan)}")]
    marks += [_mark(prediction, "best plans", f"plan {i}: {short_plan_text(prediction.plan)}") for i, prediction in enumerate(others, 2)]
    marks += [_mark(prediction, "Pareto front", short_plan_text(prediction.plan), is_front=True) for prediction in result.pareto]
    for baseline in result.baselines:
        for prediction in baseline.prediction:
            kind = "without a search" if prediction.fits else "does not fit"
            marks.append(_mark(prediction, kind, f"{baseline.name}: {short_plan_text(prediction.plan)}"))
    colours = {"plan 1": _BEST, "best plans": _OTHERS, "Pareto front": _FRONT, "without a search": "#009E73", "does not fit": _NO_FIT}
    yield _scatter(marks, colours, best)
    yield plans_table(result)
    if result.baselines:
        yield baselines_table(result)
    if any(certainty.prediction for certainty in result.certainty):
        yield certainty_table(result)
    yield Notes([*search_notes(result), *search_details(result)])
    yield rejected_table(result)


def _alternative_parts(prediction: Prediction, explanation: Explanation) -> Iterator[Part]:
    marks = [_mark(prediction, "this plan", f"this plan: {short_plan_text(prediction.plan)}")]
    for neighbour in explanation.neighbours:
        for alternative in neighbour.prediction:
            kind = "one knob changed" if alternative.fits else "does not fit"
            marks.append(_mark(alternative, kind, knobs_text({**neighbour.knobs, **neighbour.changed})))
    yield _scatter(marks, {"this plan": _BEST, "one knob changed": _FRONT, "does not fit": _NO_FIT}, prediction)
    if explanation.neighbours:
        yield neighbours_table(explanation)
    if explanation.remedies:
        yield fitting_changes_table(explanation.remedies)


# --- sources --------------------------------------------------------------------------------------------------------


def basis_table(predictions: Mapping[str, Prediction]) -> Table:
    """Return the table of the basis of each part of the step time, per plan."""
    rows = [(name, line) for name, prediction in predictions.items() for line in basis_lines(prediction)]
    return Table(title="Basis of the times", headers=("plan", "based on"), rows=tuple(rows), fold=("based on",))


def sources_table(
    model: Any, cluster: Cluster, calibrations: Sequence[Calibration], peak: tuple[float, str], runs: tuple[str, str, str]
) -> Table:
    """Return the records behind a prediction, and the sources of their numbers.

    calibrations   of each kind of chips
    peak           rate [FLOP/s] and its dtype; of several kinds of chips the mean
    runs           row of the framework or engine: (record, name, source)
    """
    size = f", {format_count(model.num_parameters)} parameters" if hasattr(model, "num_parameters") else ""
    rows = [("model", f"{model.name}{size}", getattr(model, "source", ""))]
    for pool, calibration in zip(cluster.pools or (cluster,), calibrations, strict=True):
        chip = pool.chip
        flop_rate = chip.peak_flop_rate.get(Dtype(peak[1]), 0.0) if cluster.pools else peak[0]
        rate = f"{format_flop_rate(flop_rate)} dense {peak[1]}"
        memory = f"{format_bytes(chip.memory.capacity)}, {format_bandwidth(chip.memory.bandwidth)}"
        rows += [
            ("chip", f"{chip.name}: {rate}, {memory}", chip.source),
            ("cluster", f"{pool.num_chips} of {short_name(pool.name)}" if cluster.pools else short_name(pool.name), pool.source),
            *(
                (
                    f"network {tier.name}",
                    f"{tier.size:,} chips, {format_bandwidth(tier.link.bandwidth)}, {format_time(tier.link.latency)}",
                    tier.source,
                )
                for tier in pool.tiers
            ),
            ("kernels", calibration.name or "spec sheet", calibration.source),
        ]
    rows.append(runs)
    return Table(title="Sources", headers=("record", "value", "source"), rows=tuple(rows), fold=("value", "source"))


def _reproduce(commands: Sequence[str], files: Mapping[str, str]) -> PageSection:
    return PageSection("Reproduce", [*map(Command, commands), *(folded(name, text) for name, text in files.items())])
