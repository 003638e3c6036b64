"""The errors of predictions as tables for people: `perfmodel validate` prints them, docs/accuracy.md holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfmodel.report.judgement import ErrorSummary, FitCounts, MemorySummary, ValidationResult
from perfmodel.report.plan_choice import LEAST_PLANS, ChoiceSummary, PlanChoices
from perfmodel.report.table import Table

_NONE = "-"


def headline(result: ValidationResult) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in result.kinds.items())
    return (
        f"{result.num_predicted:,} of {result.num_rows:,} cases predicted ({kinds or 'no cases'}).\n"
        "Errors are |predicted / measured - 1|; bias is the median of predicted / measured - 1."
    )


def result_tables(result: ValidationResult) -> list[Table]:
    """Everything that there is to say of the rows, a table for each question."""
    tables = [error_table(field, summaries, result.overall) for field, summaries in result.by.items()]
    if result.memories:
        tables.append(memory_table(result.memories))
    if result.fits.num_ran or result.fits.num_out:
        tables.append(fit_table(result))
    if result.choices.groups:
        tables.append(choice_table(result.choices))
    if result.reasons:
        tables.append(reason_table(result))
    return tables


def error_table(field: str, summaries: Sequence[ErrorSummary], overall: ErrorSummary | None = None) -> Table:
    every = [*summaries, *([] if overall is None else [overall])]
    has_intervals = any(each.num_intervals for each in every)
    has_memories = any(each.num_memories for each in every)
    held = (("in 80 %",) if has_intervals else ()) + (("memories", "their mean") if has_memories else ())
    headers = (field, "cases", "predicted", "times", "mean", "median", "p90", "bias", *held)
    rows = tuple(
        (
            each.name,
            f"{each.num_rows:,}",
            f"{each.num_predicted:,}",
            f"{each.num_times:,}",
            *map(share_text, (each.mean, each.median, each.p90, each.bias)),
            *([_whole(each.coverage)] if has_intervals else []),
            *([f"{each.num_memories:,}", share_text(each.memory_mean)] if has_memories else []),
        )
        for each in every
    )
    return Table(title=f"Errors by {field}", headers=headers, rows=rows, right=headers[1:])


def memory_table(memories: Sequence[MemorySummary]) -> Table:
    headers = ("source", "framework", "counts", "of rank", "cases", "mean", "median", "p90", "bias")
    rows = tuple(
        (
            each.name,
            each.framework,
            each.kind,
            each.rank,
            f"{each.num_rows:,}",
            *map(share_text, (each.mean, each.median, each.p90, each.bias)),
        )
        for each in memories
    )
    return Table(title="Peak memory", headers=headers, rows=rows, right=headers[4:])


def fit_table(result: ValidationResult) -> Table:
    frameworks = result.framework_fits if len(result.framework_fits) > 1 else ()
    headers = ("framework", "right", "ran", "of them predicted not to fit", "ran out", "of them predicted to fit")
    rows = tuple(_fit_row(each) for each in (*frameworks, result.fits))
    return Table(title="Does it fit? Runs that state their recomputation", headers=headers, rows=rows, right=headers[1:])


def _fit_row(each: FitCounts) -> tuple[str, ...]:
    return (
        each.name,
        share_text(each.accuracy),
        f"{each.num_ran:,}",
        _count(each.ran_but_predicted_out, each.false_out_fraction),
        f"{each.num_out:,}",
        _count(each.out_but_predicted_fits, each.false_fit_fraction),
    )


def choice_table(choices: PlanChoices) -> Table:
    headers = ("source", "groups", "plans", "mean", "largest", "if it fits", "best of 3 near", "rank correlation", "median plan")

    def row(each: ChoiceSummary) -> tuple[str, ...]:
        return (
            each.name,
            f"{each.num_groups:,}",
            f"{each.num_plans:,}",
            *map(share_text, (each.mean_regret, each.largest_regret, each.mean_fitting_regret)),
            _whole(each.near_best_fraction),
            _NONE if math.isnan(each.rank_correlation) else f"{each.rank_correlation:.2f}",
            share_text(each.median_plan),
        )

    rows = tuple(map(row, (*choices.sources, choices.overall)))
    return Table(title="Choice of plan: how much slower than the best the first is", headers=headers, rows=rows, right=headers[1:])


def choice_lines(choices: PlanChoices) -> list[str]:
    """What the table of choices counts and leaves out."""
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
        verb = "are left out of it" if choices.skips_broken_nvlink else "are in it (--skip-broken-nvlink leaves them out)"
        lines.append(
            f"{choices.num_broken_nvlink:,} runs whose notes give an all-reduce in the node of under 100 GB/s (broken NVLink) {verb}."
        )
    return lines


def reason_table(result: ValidationResult) -> Table:
    return Table(
        title="Not predicted",
        headers=("cases", "reason"),
        rows=tuple((f"{count:,}", reason) for reason, count in result.reasons.items()),
        right=("cases",),
        fold=("reason",),
    )


def share_text(value: float) -> str:
    """With a sign where it is negative, with one digit: 4.1%, -0.3%."""
    return _NONE if math.isnan(value) else f"{value:.1%}"


def _whole(value: float) -> str:
    return _NONE if math.isnan(value) else f"{value:.0%}"


def _count(count: int, share: float) -> str:
    return f"{count:,}" if math.isnan(share) else f"{count:,} ({share:.1%})"
