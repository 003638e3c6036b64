"""Tables of prediction errors: printed by `perfmodel validate`, and contained in docs/accuracy.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from perfmodel.foundation.memory_headroom import DEFAULT_HEADROOM
from perfmodel.parallel.interval import METRICS
from perfmodel.report.table import Table
from perfmodel.validation.judgement import (
    ErrorSummary,
    ExpertFigures,
    FitCounts,
    MemorySummary,
    ServingResult,
    ValidationResult,
    error_summary,
    errors_by,
)
from perfmodel.validation.plan_choice import LEAST_PLANS, ChoiceSummary, PlanChoices

_NONE = "-"
WORDS = {"ttft": "TTFT", "tpot": "TPOT", "request_latency": "latency", "tokens_per_second": "tokens/s"}
"""Printed names of the metrics of a service."""

Columns: TypeAlias = dict[str, Callable[[ErrorSummary], str]]
"""Header -> cell of a row."""


def headline(result: ValidationResult) -> str:
    """Return the number of predicted runs, and the errors of the scored ones."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in result.kinds.items())
    lines = [f"{result.num_predicted:,} of {result.num_rows:,} cases predicted ({kinds or 'no cases'})."]
    if result.scored.num_runs:
        overall, choice = result.scored.overall.times, result.scored.choices.overall
        lines.append(
            f"{overall.count:,} of them are scored (primary sources, dense decoders, with a step time): off by "
            f"{share_text(overall.mean)} on average, {share_text(overall.median)} in the median, "
            f"{share_text(overall.p90)} at the 90th percentile."
        )
        if choice.num_groups:
            lines.append(
                f"The plan predicted to be fastest is {share_text(choice.mean_regret)} slower than the measured best, on average over "
                f"{choice.num_groups:,} groups of plans."
            )
        lines.append("Each framework's constants were chosen with such runs in view; docs/accuracy.md has errors on models left out.")
    return "\n".join([*lines, "Errors are |predicted / measured - 1|; bias is the median of predicted / measured - 1."])


def result_tables(result: ValidationResult) -> list[Table]:
    """Return all tables, one for each question: of the scored runs first, then of the others."""
    scored, tables = result.scored, []
    others = [row for row in result.rows if not (row.is_scored or row.case.has_experts)]
    if scored.num_runs:
        tables += [error_table(field, summaries, scored.overall, of=", scored runs") for field, summaries in scored.by.items()]
        tables += [choice_table(scored.choices, of=", scored runs")] if scored.choices.groups else []
    if others:
        of, overall = (", not scored", error_summary("all", others)) if scored.num_runs else ("", result.overall)
        tables += [error_table(field, errors_by(others, field), overall, of=of) for field in result.by]
    if result.memories:
        tables.append(memory_table(result.memories))
    tables += expert_tables(result.experts)
    if result.fits.num_ran or result.fits.num_out:
        tables.append(fit_table(result))
    if result.choices.groups and result.choices.overall != scored.choices.overall:
        tables.append(choice_table(result.choices, of=", all runs" if scored.num_runs else ""))
    if result.reasons:
        tables.append(reason_table(result.reasons))
    return tables


def error_table(field: str, summaries: Sequence[ErrorSummary], overall: ErrorSummary | None = None, *, of: str = "") -> Table:
    """Return a table of errors of step times and of memory by label."""
    every = [*summaries, *([] if overall is None else [overall])]
    columns: Columns = {
        "cases": lambda errors: f"{errors.num_rows:,}",
        "predicted": lambda errors: f"{errors.num_predicted:,}",
        "times": _figure("step_time", "count", "{:,}".format),
        **{name: _figure("step_time", name) for name in ("mean", "median", "p90", "bias")},
    }
    if any(summary.times.num_intervals for summary in every):
        columns["in 80 %"] = _figure("step_time", "coverage", _rounded_share)
    if any(summary.memories.count for summary in every):
        columns |= {"memories": _figure("memory", "count", "{:,}".format), "their mean": _figure("memory", "mean")}
    return _errors_table(f"Errors by {field}{of}", field, every, columns)


def serving_error_table(title: str, field: str, summaries: Sequence[ErrorSummary], overall: ErrorSummary | None = None) -> Table:
    """Return a table of errors by metric: count, median, 90th percentile and bias."""
    every = [*summaries, *([] if overall is None or len(summaries) < 2 else [overall])]
    columns: Columns = {"cases": lambda errors: f"{errors.num_rows:,}"}
    for metric in METRICS:
        if any(errors.metrics[metric].count for errors in every):
            columns[f"{WORDS[metric]}: runs"] = _figure(metric, "count", "{:,}".format, empty="")
            columns |= {f"{WORDS[metric]}: {name}": _figure(metric, name, empty="") for name in ("median", "p90", "bias")}
    columns["no fit"] = lambda errors: str(errors.num_out or "")
    return _errors_table(title, field, every, columns)


def _figure(metric: str, name: str, form: Callable[[float], str] | None = None, empty: str | None = None) -> Callable[[ErrorSummary], str]:
    """Return the cell of a statistic of a metric. form: `share_text` by default; empty: text of a metric without errors."""

    def cell(errors: ErrorSummary) -> str:
        statistics = errors.metrics[metric]
        return (form or share_text)(getattr(statistics, name)) if statistics.count or empty is None else empty

    return cell


def _errors_table(title: str, field: str, summaries: Sequence[ErrorSummary], columns: Columns) -> Table:
    headers = (field, *columns)
    rows = tuple((errors.name, *(cell(errors) for cell in columns.values())) for errors in summaries)
    return Table(title=title, headers=headers, rows=rows, right=headers[1:])


def expert_tables(experts: ExpertFigures) -> list[Table]:
    """Return tables of mixture-of-experts models: times of the fastest release of each setting, by field, and memory."""
    if not experts.overall.num_rows:
        return []
    of = f", models with experts, the fastest release of each setting ({experts.num_releases:,} runs)"
    tables = [error_table(field, summaries, experts.overall, of=of) for field, summaries in experts.by.items()]
    return [*tables, *([memory_table(experts.memories, of=", models with experts")] if experts.memories else [])]


def memory_table(memories: Sequence[MemorySummary], *, of: str = "") -> Table:
    headers = ("source", "framework", "counts", "of rank", "cases", "mean", "median", "p90", "bias")
    rows = tuple(
        (
            memory.name,
            memory.framework,
            memory.kind,
            memory.rank,
            f"{memory.errors.count:,}",
            *map(share_text, (memory.errors.mean, memory.errors.median, memory.errors.p90, memory.errors.bias)),
        )
        for memory in memories
    )
    return Table(title=f"Peak memory{of}", headers=headers, rows=rows, right=headers[4:])


def fit_table(result: ValidationResult) -> Table:
    sources = result.source_fits if len(result.source_fits) > 1 else ()
    headers = ("source", "right", "ran", "of them predicted not to fit", "ran out", "of them predicted to fit")
    rows = tuple(
        (
            counts.name,
            share_text(counts.accuracy),
            f"{counts.num_ran:,}",
            _count(counts.ran_but_predicted_out, counts.false_out_fraction),
            f"{counts.num_out:,}",
            _count(counts.out_but_predicted_fits, counts.false_fit_fraction),
        )
        for counts in (*sources, result.fits)
    )
    return Table(title="Does it fit? Runs that state their recomputation", headers=headers, rows=rows, right=headers[1:])


def fit_lines(counts: FitCounts) -> list[str]:
    """Return the meaning of `fits`, and the mistakes that these files cannot contain."""
    if not (counts.num_ran or counts.num_out):
        return []
    lines = [
        "",
        f"Does it fit: a plan that fits leaves {DEFAULT_HEADROOM:.0%} of what the runtime offers free; tight plans count as not fitting.",
    ]
    if not counts.num_out:
        lines.append("None of these runs ran out of memory: how many such are predicted to fit is not known; give a file that has some.")
    elif not counts.num_ran:
        lines.append("All of these runs ran out of memory: how many that ran are predicted not to fit is not known; give a file of such.")
    return lines


def choice_table(choices: PlanChoices, *, of: str = "") -> Table:
    headers = ("source", "groups", "plans", "mean", "largest", "if it fits", "best of 3 near", "rank correlation", "median plan")

    def row(summary: ChoiceSummary) -> tuple[str, ...]:
        return (
            summary.name,
            f"{summary.num_groups:,}",
            f"{summary.num_plans:,}",
            *map(share_text, (summary.mean_regret, summary.largest_regret, summary.mean_fitting_regret)),
            _rounded_share(summary.near_best_fraction),
            _NONE if math.isnan(summary.rank_correlation) else f"{summary.rank_correlation:.2f}",
            share_text(summary.median_plan),
        )

    rows = tuple(map(row, (*choices.sources, choices.overall)))
    return Table(title=f"Choice of plan{of}: how much slower than the best the first is", headers=headers, rows=rows, right=headers[1:])


def choice_lines(choices: PlanChoices) -> list[str]:
    """Return lines on the runs that the table of choices counts and leaves out."""
    lines = []
    if choices.groups:
        lines = [
            "",
            f"Choice of plan: groups of at least {LEAST_PLANS} runs that differ in their plan only (same source, framework, model,",
            "chip, chips, precision, global batch, sequence). mean, largest: measured time of the plan predicted to be fastest,",
            "over the measured best; if it fits: the same among plans predicted to fit; best of 3 near: share of groups where the",
            "best of the first three is within 3 % of the best; median plan: the same for the median plan, what is at stake.",
        ]
        if choices.num_small_groups:
            lines.append(f"{choices.num_small_groups:,} groups of two or three plans are not judged.")
    if choices.num_broken_nvlink:
        one = choices.num_broken_nvlink == 1
        runs, verb, them = ("run", "is", "it") if one else ("runs", "are", "them")
        inclusion = (
            "left out of it" if choices.skips_broken_nvlink else f"in it, scored runs aside (--skip-broken-nvlink leaves {them} out)"
        )
        notes = "give an all-reduce in the node of under 100 GB/s (broken NVLink)"
        lines.append(f"{choices.num_broken_nvlink:,} {runs} whose notes {notes} {verb} {inclusion}.")
    return lines


def reason_table(reasons: Mapping[str, int]) -> Table:
    rows = tuple((f"{count:,}", reason) for reason, count in reasons.items())
    return Table(title="Not predicted", headers=("cases", "reason"), rows=rows, right=("cases",), fold=("reason",))


def serving_headline(result: ServingResult) -> str:
    scored = result.overall
    parts = [
        f"{WORDS[metric]} {share_text(statistics.median)} ({share_text(statistics.p90)} at the 90th percentile, {statistics.count:,} runs)"
        for metric, statistics in scored.metrics.items()
        if statistics.count
    ]
    lines = [f"{result.num_predicted:,} of {result.num_rows:,} cases of serving predicted."]
    if parts:
        lines.append(f"Median errors of the {scored.num_rows:,} scored runs (primary, nothing suspect): {'; '.join(parts)}.")
        ran = f"{scored.num_out:,} of them are predicted not to fit" if scored.num_out else "all of them are predicted to fit"
        lines.append(f"They all ran: {ran}.")
    if result.num_suspect:
        lines.append(f"{result.num_suspect:,} runs that the data mark as suspect are predicted and not scored.")
    return "\n".join(lines)


def serving_tables(result: ServingResult) -> list[Table]:
    tables = [
        serving_error_table(f"Errors of serving by {field}, scored runs", field, summaries, result.overall)
        for field, summaries in result.by.items()
    ]
    rest = [errors for errors in (result.secondary, result.second_hand) if errors.num_rows]
    if rest:
        tables.append(serving_error_table("Errors of serving, not scored", "runs", rest))
    if result.reasons:
        tables.append(reason_table(result.reasons))
    return tables


def share_text(value: float) -> str:
    """Return a share with one digit, with a sign where it is negative: 4.1%, -0.3%."""
    return _NONE if math.isnan(value) else f"{value:.1%}"


def _rounded_share(value: float) -> str:
    return _NONE if math.isnan(value) else f"{value:.0%}"


def _count(count: int, share: float) -> str:
    return _NONE if math.isnan(share) else f"{count:,} ({share:.1%})"
