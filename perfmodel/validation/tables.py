"""The errors of predictions as tables for people: `perfmodel validate` prints them, docs/accuracy.md holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perfmodel.foundation.memory_headroom import DEFAULT_HEADROOM
from perfmodel.report.table import Table
from perfmodel.validation.judgement import ErrorSummary, ExpertFigures, FitCounts, MemorySummary, ValidationResult, error_summary, errors_by
from perfmodel.validation.plan_choice import LEAST_PLANS, ChoiceSummary, PlanChoices

_NONE = "-"


def headline(result: ValidationResult) -> str:
    """Number of predicted runs, and errors of the scored ones."""
    counts = {**result.kinds, **({"inference": result.serving.num_rows} if result.serving is not None else {})}
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    lines = [f"{result.num_predicted:,} of {result.num_rows:,} cases predicted ({kinds or 'no cases'})."]
    if result.scored.num_runs:
        each, choice = result.scored.overall, result.scored.choices.overall
        lines.append(
            f"{each.num_times:,} of them are scored (primary sources, dense decoders, with a step time): off by {share_text(each.mean)} on "
            f"average, {share_text(each.median)} in the median, {share_text(each.p90)} at the 90th percentile."
        )
        if choice.num_groups:
            lines.append(
                f"The plan predicted to be fastest is {share_text(choice.mean_regret)} slower than the measured best, on average over "
                f"{choice.num_groups:,} groups of plans."
            )
        lines.append("Each framework's constants were chosen with such runs in view; docs/accuracy.md has errors on models left out.")
    return "\n".join([*lines, "Errors are |predicted / measured - 1|; bias is the median of predicted / measured - 1."])


def result_tables(result: ValidationResult) -> list[Table]:
    """Everything that there is to say of the rows, a table for each question: of the scored ones first, then of the others."""
    scored, tables = result.scored, []
    others = [row for row in result.rows if not (row.is_scored or row.has_experts)]
    if scored.num_runs:
        tables += [error_table(field, each, scored.overall, of=", scored runs") for field, each in scored.by.items()]
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
    return Table(title=f"Errors by {field}{of}", headers=headers, rows=rows, right=headers[1:])


def expert_tables(experts: ExpertFigures) -> list[Table]:
    """Models with experts: times of the fastest release of each setting, by field, and memory."""
    if not experts.overall.num_rows:
        return []
    of = f", models with experts, the fastest release of each setting ({experts.num_releases:,} runs)"
    tables = [error_table(field, each, experts.overall, of=of) for field, each in experts.by.items()]
    return [*tables, *([memory_table(experts.memories, of=", models with experts")] if experts.memories else [])]


def memory_table(memories: Sequence[MemorySummary], *, of: str = "") -> Table:
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
    return Table(title=f"Peak memory{of}", headers=headers, rows=rows, right=headers[4:])


def fit_table(result: ValidationResult) -> Table:
    sources = result.source_fits if len(result.source_fits) > 1 else ()
    headers = ("source", "right", "ran", "of them predicted not to fit", "ran out", "of them predicted to fit")
    rows = tuple(_fit_row(each) for each in (*sources, result.fits))
    return Table(title="Does it fit? Runs that state their recomputation", headers=headers, rows=rows, right=headers[1:])


def fit_lines(counts: FitCounts) -> list[str]:
    """Meaning of `fits`, and mistakes that these files cannot show."""
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


def _fit_row(each: FitCounts) -> tuple[str, ...]:
    return (
        each.name,
        share_text(each.accuracy),
        f"{each.num_ran:,}",
        _count(each.ran_but_predicted_out, each.false_out_fraction),
        f"{each.num_out:,}",
        _count(each.out_but_predicted_fits, each.false_fit_fraction),
    )


def choice_table(choices: PlanChoices, *, of: str = "") -> Table:
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
    return Table(title=f"Choice of plan{of}: how much slower than the best the first is", headers=headers, rows=rows, right=headers[1:])


def choice_lines(choices: PlanChoices) -> list[str]:
    """Runs that the table of choices counts and leaves out."""
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
        place = "left out of it" if choices.skips_broken_nvlink else f"in it, scored runs aside (--skip-broken-nvlink leaves {them} out)"
        notes = "give an all-reduce in the node of under 100 GB/s (broken NVLink)"
        lines.append(f"{choices.num_broken_nvlink:,} {runs} whose notes {notes} {verb} {place}.")
    return lines


def reason_table(reasons: Mapping[str, int]) -> Table:
    rows = tuple((f"{count:,}", reason) for reason, count in reasons.items())
    return Table(title="Not predicted", headers=("cases", "reason"), rows=rows, right=("cases",), fold=("reason",))


def share_text(value: float) -> str:
    """With a sign where it is negative, with one digit: 4.1%, -0.3%."""
    return _NONE if math.isnan(value) else f"{value:.1%}"


def _whole(value: float) -> str:
    return _NONE if math.isnan(value) else f"{value:.0%}"


def _count(count: int, share: float) -> str:
    return _NONE if math.isnan(share) else f"{count:,} ({share:.1%})"
