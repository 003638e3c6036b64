"""Write docs/accuracy.md: errors of training predictions on published runs.

    python -m lab.accuracy CASES.jsonl [OOM.jsonl ...] [--left-out FILE.csv] [--out docs/accuracy.md]

Figures go to a folder `figures` next to the file. `--left-out` is the output of `python -m lab.left_out`: predictions of the same runs by
fits that did not see their model. The text is in `lab/pages/accuracy.md`.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.ablation import Ablation, ablation_values, ablations
from lab.accuracy_lines import EVERY, SMALL, cause_of, errors_by_line, median_of_means
from lab.cases import read_runs
from lab.command import command_parser, exits_on_errors
from lab.few_runs import GroupFigures, few_runs_figures, few_runs_sections
from lab.kernels.clocks import Rate, clocks_values, fitted_clocks
from lab.memory_outcomes import MemoryOutcome
from lab.pages import Section, page, percent, percent_number, statistics_text, table
from lab.unseen import UnseenFigures, UnseenFrameworks, choices_of, figures_of, fit_check_sections, unseen_sections
from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.resources import write_atomically
from perfmodel.frameworks.profile import list_profiles, load_profile
from perfmodel.hardware.reader import list_calibrations, load_calibration
from perfmodel.report.markdown import markdown_table
from perfmodel.validation.cases import read_cases
from perfmodel.validation.figures import write_figures
from perfmodel.validation.judgement import ValidationResult, error_summary, errors_by, summarise
from perfmodel.validation.plan_choice import NEAR_BEST, PlanChoices, PlanGroup
from perfmodel.validation.rows import NO_TIMES, TrainingRow
from perfmodel.validation.statistics import error_statistics
from perfmodel.validation.tables import choice_table, error_table, expert_tables, fit_table, memory_table, reason_table
from perfmodel.validation.validate import validate_cases

_WORST = 20
_FIELDS = ("source", "chip", "size", "chips", "form")
_FIGURES = {
    "predicted_against_measured": "Predicted against measured step time",
    "error_by_chips": "Error by number of chips",
    "error_distribution": "Distribution of the errors",
}

Sections = Iterator[Section]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyReport:
    """Contents of the page.

    names      files of the cases, as they were given
    result     every case, as `perfmodel validate` predicts it
    left_out   id -> step time predicted by a fit that did not see the run's model; empty: not given
    small      id -> error of a small job with its framework left out
    unseen     figures by group, with the framework left out and with its family left out; choices, outcomes (of memory): of the first
    few        errors, intervals and choices of plan where some runs of an unseen framework are given
    clocks     rates that no table of kernels determines, by the published runs
    """

    result: ValidationResult
    left_out: Mapping[str, float]
    names: tuple[str, ...]
    unseen: tuple[Mapping[str, UnseenFigures], Mapping[str, UnseenFigures]] = ({}, {})
    choices: PlanChoices | None = None
    ablations: tuple[Ablation, ...] = ()
    outcomes: tuple[MemoryOutcome, ...] = ()
    small: Mapping[str, float] = field(default_factory=dict)
    few: Sequence[GroupFigures] = ()
    clocks: Sequence[Rate] = ()

    @property
    def scored(self) -> list[TrainingRow]:
        return [row for row in self.result.rows if row.is_scored]

    @property
    def scored_left_out(self) -> list[TrainingRow]:
        return [predicted_as(row, self.left_out[row.id]) for row in self.scored if row.id in self.left_out]


def predicted_as(row: TrainingRow, time: float) -> TrainingRow:
    """Return the row with another predicted time; its interval keeps its factors."""
    factor = time / row.predicted_step_time
    intervals = {metric: (low * factor, high * factor) for metric, (low, high) in row.intervals.items()}
    return replace(row, predicted={**row.predicted, "step_time": time}, intervals=intervals)


def read_left_out(path: Path) -> dict[str, float]:
    """Return id -> predicted step time."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return {row["id"]: float(row["predicted_step_time"]) for row in csv.DictReader(stream) if row["predicted_step_time"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"left_out={one_line(path, 200)}: cannot be read ({one_line(error, 100)}); give a table with id and predicted_step_time"
        ) from None


def document(report: AccuracyReport, *, figures: str = "figures") -> str:
    """Return the page."""
    parts: Sequence[Callable[[AccuracyReport], Sections]] = (
        _introduction,
        _main_table,
        _unseen,
        _small,
        lambda _: iter([("method", {"no_times": ", ".join(NO_TIMES)})]),
        lambda report: _tables_by_field(report, figures),
        _plan_choice,
        _memory_and_fits,
        _experts,
        _intervals,
        _fitted,
        _worst,
        _not_scored,
        _rebuild,
    )
    return page("accuracy", (section for part in parts for section in part(report)), wraps=True)


def _introduction(report: AccuracyReport) -> Sections:
    scored = report.scored
    overall = error_summary("all", scored).times
    counts = {"runs": f"{len(scored):,}", "sources": len({row.group for row in scored})}
    yield "introduction", {**counts, **statistics_text(overall, "median mean p90", percent)}


def _main_table(report: AccuracyReport) -> Sections:
    scored, others = (errors_by_line((row.labels, row.time_error) for row in rows) for rows in (report.scored, report.scored_left_out))
    headers = ["runs", "n", "mean", "median", "p90", "max", "bias"]
    headers += ["mean, left out", "p90, left out", "max, left out"] if others else []
    rows = []
    for line, errors in scored.items():
        of, left = error_statistics(errors), error_statistics(others.get(line, ()))
        left_out = statistics_text(left, "mean p90 largest").values() if others else ()
        title = f"**{line.title}**" if line is EVERY else line.title
        rows.append((title, f"{of.count:,}", *statistics_text(of, "mean median p90 largest bias").values(), *left_out, line.others))
    medians = {"In-sample": median_of_means(scored), **({"Left out": median_of_means(others)} if others else {})}
    texts = [f"{name}: the median of the mean errors of these rows is {percent(value)}." for name, value in medians.items()]
    yield "step_time", {"table": table([*headers, "other models"], rows, headers[1:]), "medians": " ".join(texts)}
    if others:
        yield (
            "left_out",
            {"title": EVERY.title, **statistics_text(error_statistics(others.get(EVERY, ())), "median mean p90 bias", percent)},
        )
    else:
        yield "not_left_out", {}


def _tables_by_field(report: AccuracyReport, figures: str) -> Sections:
    scored, tables = report.scored, []
    for label in _FIELDS:
        errors = error_table(label, errors_by(scored, label), error_summary("all", scored))
        keep = [i for i, header in enumerate(errors.headers) if header not in ("cases", "predicted")]
        tables.append(table([errors.headers[i] for i in keep], [[row[i] for i in keep] for row in errors.rows]))
    tables += [f"![{words}]({figures}/{name}.png)" for name, words in _FIGURES.items()]
    yield "errors", {"tables": "\n\n".join(tables)}


def _plan_choice(report: AccuracyReport) -> Sections:
    rows = {"In-sample": report.scored, "Left out": report.scored_left_out}
    by_kind = {name: summarise(scored, skip_broken_nvlink=True).choices for name, scored in rows.items()}
    by_kind = {name: choices for name, choices in by_kind.items() if choices.groups}
    if by_kind:
        num_broken = list(by_kind.values())[-1].num_broken_nvlink
        yield "choice", {"broken": f"{num_broken} {'run' if num_broken == 1 else 'runs'}"}
    for name, choices in by_kind.items():
        yield "choice_table", {"name": name, "table": markdown_table(choice_table(choices)), "worst": _worst_groups(choices.groups)}


def _worst_groups(groups: Sequence[PlanGroup]) -> str:
    """Return a list of the groups with the largest regrets, those within noise left out."""
    worst = [group for group in sorted(groups, key=lambda group: -group.regret) if group.regret > NEAR_BEST]
    if not worst:
        return "No group has a regret over 3 %."
    lines = [
        f"- {group.source} {group.model} on {group.num_chips:,.0f} chips ({group.num_plans} plans): {percent(group.regret)}, best of the "
        f"first three {percent(group.best_of_three)}"
        for group in worst
    ]
    return "\n".join(["Largest regrets:", "", *lines, "- every other group: at most 3 %"])


def _memory_and_fits(report: AccuracyReport) -> Sections:
    result = report.result
    has_fits = result.fits.num_ran or result.fits.num_out
    if result.memories or has_fits:
        yield "memory", {}
    if result.memories:
        yield "memory_table", {"table": markdown_table(memory_table(result.memories))}
    if has_fits:
        yield "fit_table", {"table": markdown_table(fit_table(result))}


def _experts(report: AccuracyReport) -> Sections:
    experts = report.result.experts
    if experts.overall.num_predicted:
        tables = expert_tables(experts)
        texts = [f"{part.title.partition(', models')[0]}:\n\n{markdown_table(part)}" for part in tables]
        yield "experts", {"tables": "\n\n".join(texts)}


def _unseen(report: AccuracyReport) -> Sections:
    """Yield the sections on unseen frameworks."""
    if not report.unseen[0]:
        return
    yield from unseen_sections(*report.unseen, report.choices)
    if report.few:
        yield from few_runs_sections(report.few)
    yield from fit_check_sections(report.outcomes)


def _small(report: AccuracyReport) -> Sections:
    """Yield the section on jobs that may be bound by the host."""
    others = report.scored_left_out
    headers = ["runs", "n", "mean", "bias", *(["mean, left out"] if others else []), *(["mean, unseen framework"] if report.small else [])]
    rows, means = [], []
    for title, holds in SMALL:
        runs = [row for row in report.scored if holds(row.labels)]
        if not runs:
            continue
        of = error_summary(title, runs).times
        row_means = [of.mean]
        if others:
            row_means.append(error_summary(title, [row for row in others if holds(row.labels)]).times.mean)
        if report.small:
            hidden = [abs(report.small[row.id]) for row in runs if row.id in report.small]
            row_means.append(sum(hidden) / len(hidden) if hidden else math.nan)
        means.append(row_means)
        rows.append((title, str(len(runs)), percent_number(row_means[0]), f"{100 * of.bias:+.1f}", *map(percent_number, row_means[1:])))
    if not rows:
        return
    total = [sum(column) / len(column) for column in zip(*means, strict=True)]
    rows.append(("**mean over rows**", "", percent_number(total[0]), "", *map(percent_number, total[1:])))
    faster = [row.id for row in report.scored if row.labels.peak_share > 1.0]
    impossible = f" Left out: {', '.join(faster)}, which is faster in its source than its chips can multiply." if faster else ""
    yield "small", {"impossible": impossible, "table": table(headers, rows)}


def _intervals(report: AccuracyReport) -> Sections:
    headers = ["source", "runs", "coverage", "median width"]
    others = report.scored_left_out
    headers += ["coverage, left out"] if others else []
    rows = []
    for name in [*sorted({row.group for row in report.scored}), "all"]:
        known, left = ([row for row in part if name in (row.group, "all")] for part in (report.scored, others))
        summary = error_summary(name, known).times
        if not summary.num_intervals:
            return
        unseen = [f"{error_summary(name, left).times.coverage:.0%}" if left else "-"] if others else []
        widths = sorted(high / low - 1 for row in known for low, high in row.intervals.values())
        width = f"{widths[len(widths) // 2]:.0%}" if widths else "-"
        rows.append((name, f"{summary.num_intervals:,}", f"{summary.coverage:.0%}", width, *unseen))
    rows.append(("mean over sources", "", _mean_coverage(report.scored), "", *([_mean_coverage(others)] if others else [])))
    yield "intervals", {"table": table(headers, rows)}


def _mean_coverage(rows: Sequence[TrainingRow]) -> str:
    """Return the share of runs in their interval, each source weighing one."""
    groups = grouped(rows, lambda row: row.group)
    shares = [error_summary(name, members).times.coverage for name, members in sorted(groups.items())]
    return f"{sum(shares) / len(shares):.0%}"


def _fitted(report: AccuracyReport) -> Sections:
    loaded = {name: load_calibration(name) for name in list_calibrations()}
    rows = [
        (name, part, f"{calibration.fit.points.get(part, 0):,}", f"{100 * error:.1f}", calibration.date)
        for name, calibration in loaded.items()
        for part, error in calibration.fit.errors.items()
    ]
    yield (
        "fitted",
        {
            "table": table(("calibration", "part", "points", "error %", "date"), rows, ("points", "error %")),
            "calibrations": "\n".join(f"- `{name}`: {' '.join(calibration.source.split())}." for name, calibration in loaded.items()),
            "frameworks": "\n".join(f"- `{name}`: {' '.join(load_profile(name).source.split()).rstrip('.')}." for name in list_profiles()),
        },
    )
    if report.ablations:
        yield "ablation", ablation_values(report.ablations)
    if report.clocks:
        yield "clocks", clocks_values(report.clocks)


def _worst(report: AccuracyReport) -> Sections:
    worst = sorted(report.scored, key=lambda row: -abs(math.log1p(row.time_error)))[:_WORST]
    rows = [
        (
            row.id,
            row.labels.model,
            f"{row.labels.num_chips:,.0f} x {row.labels.chip}",
            row.labels.degrees,
            f"{row.measured_step_time:.3g}",
            f"{row.predicted_step_time:.3g}",
            f"{100 * row.time_error:+.0f}",
            cause_of(row),
        )
        for row in worst
    ]
    headers = ("run", "model", "chips", "plan", "measured s", "predicted s", "error %", "cause")
    yield "worst", {"count": len(rows), "table": table(headers, rows, headers[4:7])}


def _not_scored(report: AccuracyReport) -> Sections:
    result = report.result
    rest = [row for row in result.rows if row.has_time and not (row.is_scored or row.case.has_experts)]
    if rest or result.reasons:
        yield "not_scored", {}
    if rest:
        yield "assumed", {"table": markdown_table(error_table("source", errors_by(rest, "source")))}
    if result.reasons:
        yield "not_predicted", {"table": markdown_table(reason_table(result.reasons))}


def _rebuild(report: AccuracyReport) -> Sections:
    first, *others = report.names
    left_out = " --left-out left_out.csv" if report.left_out else ""
    lines = [f"CASES={first}"]
    lines += [f'OTHERS="{" ".join(others)}"'] if others else []
    lines += ["python -m lab.left_out $CASES --out left_out.csv"] if report.left_out else []
    lines.append(f"python -m lab.residuals $CASES{left_out}")
    lines.append(f"python -m lab.accuracy $CASES{' $OTHERS' if others else ''}{left_out} --out docs/accuracy.md")
    yield "rebuild", {"commands": "\n".join(lines)}


def write_report(cases: Sequence[Path], out: Path, *, left_out: Path | None = None) -> AccuracyReport:
    """Predict the cases, and write the page and its figures."""
    if not out.absolute().parent.is_dir():
        raise InputError(f"out={one_line(out, 200)}: its folder does not exist; make it or choose another path")
    left_out_times = {} if left_out is None else read_left_out(left_out)
    result = validate_cases(cases, skip_broken_nvlink=True)
    every = [case for path in cases for case in read_cases(path)]
    known, kin = UnseenFrameworks(), UnseenFrameworks(leaves_family=True)
    runs = list(known.times(every))
    unseen = (figures_of(runs), figures_of(kin.times(every)))
    report = AccuracyReport(
        result=result,
        left_out=left_out_times,
        names=tuple(str(path) for path in cases),
        unseen=unseen,
        choices=choices_of(runs) if unseen[0] else None,
        outcomes=tuple(known.outcomes(every)) if unseen[0] else (),
        small={small.run.id: small.error for small in known.times(every, SMALL)},
        ablations=tuple(ablations(cases[0])) if unseen[0] else (),
        few=few_runs_figures(every) if unseen[0] else (),
        clocks=fitted_clocks(read_runs(cases[0])) if unseen[0] else (),
    )
    if not report.scored:
        raise InputError("cases: none is a primary training run with a step time; there is nothing to report")
    write_figures(replace(result, rows=tuple(report.scored)), out.parent / "figures")
    write_atomically(out, document(report))
    return report


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("accuracy", __doc__, cases=False)
    parser.add_argument("cases", type=Path, nargs="+", metavar="CASES.jsonl", help="published runs, one JSON object a line")
    parser.add_argument("--left-out", type=Path, metavar="FILE.csv", help="predictions by fits that did not see the run's model")
    parser.add_argument("--out", type=Path, default=Path("docs/accuracy.md"), metavar="FILE.md")
    options = parser.parse_args(arguments)
    report = write_report(options.cases, options.out, left_out=options.left_out)
    print(f"{options.out}: {len(report.scored):,} scored runs of {report.result.num_rows:,} cases")


if __name__ == "__main__":
    sys.exit(main())
