"""Write docs/accuracy.md: errors of training predictions on published runs.

    python -m lab.accuracy CASES.jsonl [OOM.jsonl ...] [--left-out FILE.csv] [--out docs/accuracy.md]

Figures go to a folder `figures` beside the file. `--left-out` is what `python -m lab.left_out` writes: the same runs
predicted by fits that did not see their model.
"""

from __future__ import annotations

import csv
import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from lab.ablation import Ablation, ablations, worth_text
from lab.accuracy_lines import LINES, SMALL, AccuracyLine, cause_of
from lab.command import command_parser, exits_on_errors
from lab.few_runs import GroupFigures, few_runs_figures, few_runs_section
from lab.kernels.clocks import Rate, clocks_text, fitted_clocks
from lab.memory_outcomes import MemoryOutcome, reliability, reliability_line, reliability_rows
from lab.strangers import StrangerFigures, Strangers, choices_of, choices_text, figures_of, fits_of, fits_text, over_groups
from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.resources import write_atomically
from perfmodel.frameworks.profile import list_profiles, load_profile
from perfmodel.hardware.reader import list_calibrations, load_calibration
from perfmodel.report.markdown import markdown_table
from perfmodel.report.table import Table
from perfmodel.validation.cases import read_cases
from perfmodel.validation.figures import write_figures
from perfmodel.validation.judgement import NO_TIMES, ErrorSummary, ValidationResult, ValidationRow, error_summary, errors_by, summarise
from perfmodel.validation.plan_choice import NEAR_BEST, PlanChoices, PlanGroup
from perfmodel.validation.tables import choice_table, error_table, expert_tables, fit_table, memory_table, reason_table
from perfmodel.validation.validate import validate_cases

_WORST = 20
_LINE_WIDTH = 140
_FIELDS = ("source", "chip", "size", "chips", "form")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyReport:
    """What the document is written from.

    names      files of the cases, as they were given
    result     every case, as `perfmodel validate` predicts it
    left_out   id -> step time predicted by a fit that did not see the run's model; empty: not made
    small      errors of small jobs by id, with the framework hidden and left out
    strangers  the same with the name of their framework hidden: the framework left out, its whole family left out; choices, outcomes (of
               memory): of the first
    ablations  what each number is worth that runs say of a framework
    few        errors, intervals and choices of plan where some of the runs of a stranger's framework are given
    clocks     what the runs say of what no table of kernels can give
    """

    result: ValidationResult
    left_out: Mapping[str, float]
    names: tuple[str, ...]
    strangers: tuple[Mapping[str, StrangerFigures], Mapping[str, StrangerFigures]] = ({}, {})
    choices: PlanChoices | None = None
    ablations: tuple[Ablation, ...] = ()
    outcomes: tuple[MemoryOutcome, ...] = ()
    small: Mapping[str, float] = field(default_factory=dict)
    few: Sequence[GroupFigures] = ()
    clocks: Sequence[Rate] = ()

    @property
    def scored(self) -> list[ValidationRow]:
        return [row for row in self.result.rows if row.is_scored]

    @property
    def scored_left_out(self) -> list[ValidationRow]:
        return [predicted_as(row, self.left_out[row.id]) for row in self.scored if row.id in self.left_out]


def predicted_as(row: ValidationRow, time: float) -> ValidationRow:
    """The row with another predicted time; its interval keeps its factors."""
    factor = time / row.predicted_step_time
    low, high = row.step_time_low * factor, row.step_time_high * factor
    return replace(row, predicted_step_time=time, step_time_low=low, step_time_high=high)


def read_left_out(path: Path) -> dict[str, float]:
    """id -> predicted step time."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return {row["id"]: float(row["predicted_step_time"]) for row in csv.DictReader(stream) if row["predicted_step_time"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"left_out={one_line(path, 200)}: cannot be read ({one_line(error, 100)}); give a table with id and predicted_step_time"
        ) from None


def document(report: AccuracyReport, *, figures: str = "figures") -> str:
    """The whole text."""
    sections: Sequence[Callable[[AccuracyReport], str]] = (
        _introduction,
        _main_table,
        _strangers,
        _small,
        _method,
        lambda each: _tables_by_field(each, figures),
        _plan_choice,
        _memory_and_fits,
        _experts,
        _intervals,
        _fitted,
        _worst,
        _others,
        _rebuild,
    )
    text = "\n\n".join(text for text in (section(report) for section in sections) if text)
    return "\n\n".join(map(_wrapped, text.split("\n\n"))) + "\n"


def _wrapped(block: str) -> str:
    """A paragraph or a list with lines of one width; anything else as it is."""
    if block.startswith(("|", "#", "!", "```")):
        return block
    if not block.startswith("- "):
        return textwrap.fill(" ".join(block.split()), _LINE_WIDTH, break_long_words=False, break_on_hyphens=False)
    items = ("\n" + block).split("\n- ")[1:]
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()), _LINE_WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        for item in items
    )


def _introduction(report: AccuracyReport) -> str:
    scored = report.scored
    overall = error_summary("all", scored)
    sources = len({row.group for row in scored})
    return f"""# Accuracy

Errors of predicted step time and memory on published training runs. One command writes this page (last section); do not edit it by hand.

{len(scored):,} runs of {sources} sources are scored. With the shipped constants, the error of the step time is {_pct(overall.median)}
(median), {_pct(overall.mean)} (mean) and {_pct(overall.p90)} (90th percentile). **These figures are in-sample**: the constants of each
framework and the functional forms were chosen with these runs in view. Figures marked *left out* come from fits that did not see the
run's model."""


def _main_table(report: AccuracyReport) -> str:
    scored, others = report.scored, report.scored_left_out
    headers = ["runs", "n", "mean", "median", "p90", "max", "bias"]
    if others:
        headers += ["mean, left out", "p90, left out", "max, left out"]
    headers += ["other models"]
    rows = [_line(line.title, line, scored, others) for line in LINES]
    counted = [line for line in LINES if line.counts]
    every = AccuracyLine(title="all but those in brackets", holds=lambda labels: any(line.holds(labels) for line in counted))
    rows.append(_line(f"**{every.title}**", every, scored, others))
    text = markdown_table(Table(title="", headers=tuple(headers), rows=tuple(row for row in rows if row), right=tuple(headers[1:-1])))
    lines = [
        "## Step time",
        "",
        "Errors are |predicted / measured - 1| in percent; bias is the median of predicted / measured - 1. Columns",
        "not marked *left out* are in-sample.",
        "",
        text,
        "",
        _source_median(scored, counted, "In-sample"),
    ]
    if others:
        overall = error_summary("all", [row for row in others if every.holds(row.labels)])
        lines += [
            _source_median(others, counted, "Left out"),
            "",
            f"Left out, {every.title}: median {_pct(overall.median)}, mean {_pct(overall.mean)}, p90 {_pct(overall.p90)}, bias "
            f"{_pct(overall.bias)}. Each run is predicted with the constants of its framework, fitted to all runs",
            "except those of its model. A framework with a single model takes the constants of related frameworks.",
        ]
    else:
        lines += ["", "*Left out* columns (each model predicted by a fit to the others) appear when the table of those fits is given."]
    return "\n".join(lines)


def _line(title: str, line: AccuracyLine, scored: Sequence[ValidationRow], others: Sequence[ValidationRow]) -> tuple[str, ...]:
    rows = [row for row in scored if line.holds(row.labels)]
    if not rows:
        return ()
    each = error_summary(title, rows)
    cells = [title, f"{len(rows):,}", *map(_number, (each.mean, each.median, each.p90, _largest(rows), each.bias))]
    if others:
        unseen = [row for row in others if line.holds(row.labels)]
        left = error_summary(title, unseen)
        cells += map(_number, (left.mean, left.p90, _largest(unseen)))
    return (*cells, line.others)


def _source_median(rows: Sequence[ValidationRow], lines: Sequence[AccuracyLine], name: str) -> str:
    means = [error_summary("", part).mean for line in lines if (part := [row for row in rows if line.holds(row.labels)])]
    return f"{name}: the median of the mean errors of these rows is {_pct(median(means) if means else math.nan)}."


def _largest(rows: Sequence[ValidationRow]) -> float:
    return max((abs(row.time_error) for row in rows), default=math.nan)


def _method(report: AccuracyReport) -> str:
    return f"""## Method

- A case is one published run: model, chips, plan and step time (or peak memory, or an out-of-memory outcome). Every field is an input of
  the prediction except `id, source, source_ref, notes, inferred, measured, tier, outcome, suspect`; a test ensures that none of these
  changes a prediction. No constant is set for a single run or model.
- Inputs that a run does not state take the defaults of its framework (`strategies/framework_patterns.yaml`). Runs whose source
  omits an important input, usually recomputation, have tier `secondary`. They are predicted with an assumption, listed below, and not
  scored.
- Primary runs of dense decoders are scored. Not scored are {", ".join(NO_TIMES)} (launch-bound tests of toy models in deterministic mode,
  of which only the memory is meaningful) and runs that are not modelled (last table).
- Step times are measured, or computed from the published tokens per second."""


def _tables_by_field(report: AccuracyReport, figures: str) -> str:
    scored = report.scored
    parts = ["## Errors by source, chip, size and layout", "", "Scored runs, in-sample."]
    for label in _FIELDS:
        table = error_table(label, errors_by(scored, label), error_summary("all", scored))
        keep = [i for i, header in enumerate(table.headers) if header not in ("cases", "predicted")]
        headers = tuple(table.headers[i] for i in keep)
        rows = tuple(tuple(row[i] for i in keep) for row in table.rows)
        parts += ["", markdown_table(Table(title="", headers=headers, rows=rows, right=headers[1:]))]
    for name, words in (
        ("predicted_against_measured", "Predicted against measured step time"),
        ("error_by_chips", "Error by number of chips"),
        ("error_distribution", "Distribution of the errors"),
    ):
        parts += ["", f"![{words}]({figures}/{name}.png)"]
    return "\n".join(parts)


def _plan_choice(report: AccuracyReport) -> str:
    parts = []
    for name, rows in (("in-sample", report.scored), ("left out", report.scored_left_out)):
        choices = summarise(rows, skip_broken_nvlink=True).choices
        if choices.groups:
            table = choice_table(choices)
            parts += ["", f"{name.capitalize()}:", "", markdown_table(table), *_worst_groups(choices.groups)]
            num_broken = choices.num_broken_nvlink
            noted = "run" if num_broken == 1 else "runs"
    if not parts:
        return ""
    return "\n".join(
        [
            "## Choice of plan",
            "",
            "Regret: how much slower the plan predicted to be fastest is than the measured best, within groups of at least four runs. The",
            "runs of a group differ in their plan only: they share source, framework, model, chip, number of chips, precision, batch and",
            "sequence length. The column *median plan* has the regret of the median plan, as a baseline. The column *best of 3 near* has",
            "the share of groups in which the best of the first three plans is within 3 % of the measured best.",
            f"Excluded: {num_broken} {noted} whose notes give an all-reduce bandwidth in the node of under 100 GB/s (broken NVLink; other",
            "runs have 425 to 458 GB/s). This selects the runs of the groups and changes no prediction.",
            *parts,
        ]
    )


def _worst_groups(groups: Sequence[PlanGroup]) -> list[str]:
    """The groups that cost most, of those that cost more than noise."""
    worst = [group for group in sorted(groups, key=lambda each: -each.regret) if group.regret > NEAR_BEST]
    if not worst:
        return ["", "No group has a regret over 3 %."]
    return [
        "",
        "Largest regrets:",
        "",
        *(
            f"- {group.source} {group.model} on {group.num_chips:,.0f} chips ({group.num_plans} plans): {_pct(group.regret)}, best of the "
            f"first three {_pct(group.best_of_three)}"
            for group in worst
        ),
        "- every other group: at most 3 %",
    ]


def _memory_and_fits(report: AccuracyReport) -> str:
    result = report.result
    parts = ["## Memory", ""]
    if result.memories:
        parts += [
            "In-sample: the allocator overhead of each framework was set with these runs in view. Predictions are compared with the figure",
            "that the framework reports, on the rank that reports it: memory held by the allocator (reserved) or in tensors (allocated).",
            "",
            markdown_table(memory_table(result.memories)),
        ]
    if result.fits.num_ran or result.fits.num_out:
        parts += [
            "",
            "Fit check of runs that state their recomputation. `fits` counts all memory on the chip, including the driver's context.",
            "",
            markdown_table(fit_table(result)),
        ]
    return "\n".join(parts) if len(parts) > 2 else ""


def _experts(report: AccuracyReport) -> str:
    """Models with experts, which no other section holds."""
    experts = report.result.experts
    if not experts.overall.num_predicted:
        return ""
    parts = [
        "## Mixture-of-experts models",
        "",
        "Nothing is fitted to these runs, and no other figure on this page includes them. Some settings were published for several",
        "releases of one framework, with times that differ by a factor of up to 1.6; the fastest release of each setting counts. Times of",
        "toy models are excluded.",
        "",
    ]
    for table in expert_tables(experts):
        parts += [f"{table.title.partition(', models')[0]}:", "", markdown_table(replace(table, title="")), ""]
    return "\n".join(parts).rstrip()


def _strangers(report: AccuracyReport) -> str:
    """Return the section on unseen frameworks."""
    known, kin = report.strangers
    if not known:
        return ""
    headers = ("runs", "n", "bias", "mean", "in 80 %", "interval", "bias, without family", "mean, without family")
    rows = []
    for name, each in known.items():
        further = kin.get(name)
        more = (f"{100 * further.bias:+.1f}", _number(further.mean)) if further else ("", "")
        interval = f"{each.low:.2f} to {each.high:.2f}"
        rows.append((name, str(each.num_runs), f"{100 * each.bias:+.1f}", _number(each.mean), f"{each.coverage:.0%}", interval, *more))
    own = over_groups(known)
    last = ("", "")
    if kin:
        others = over_groups(kin)
        last = (f"scatter {100 * others.scatter:.1f}", _number(others.mean))
    rows.append(("**mean over groups**", "", f"scatter {100 * own.scatter:.1f}", _number(own.mean), f"{own.coverage:.0%}", "", *last))
    text = """## Unseen frameworks

Leave-one-framework-out: each run is planned without the name of its framework and predicted with `generic` (`lab/generic.py`),
made from all *other* frameworks. This is the error to expect for your own training loop. The last columns leave out the whole *family*
(Megatron-LM 2020 and 2022, DeepSpeed and NeMo are one). Figures are in percent and each group weighs one; scatter is the root mean square
of the medians. The 80 % interval of a group comes from the groups of other frameworks.

"""
    text += markdown_table(Table(title="", headers=headers, rows=tuple(rows), right=headers[1:]))
    if report.choices is not None and report.choices.groups:
        text += f"\n\n{choices_text(report.choices)}."
    return text + few_runs_section(report.few) + _reliability(report.outcomes)


def _reliability(outcomes: Sequence[MemoryOutcome]) -> str:
    """Return the fit check of an unseen framework, and the calibration of its probabilities."""
    if not outcomes:
        return ""
    bins = reliability(outcomes)
    headers, *rows = reliability_rows(bins)
    text = f"""

### Fit check

{fits_text(fits_of(outcomes))}.

The table gives the calibration of `fits_probability` on these runs. The profile is made without nanotron. The distribution of needed over
predicted memory (two numbers, `strategies/memory_doubts.yaml`) is fitted to nanotron's outcomes, for each of its models to those of the
other, because no other sweep with failures is published. Unknown framework defaults (layers placed by cost, gradients kept next to
accumulators) are taken at their worst case, with nanotron's in view. Errors are in percentage points. The last column is the 95 %
confidence interval of the observed share (Wilson); it is wide because few runs lie near a memory limit.
{reliability_line(bins)}.

"""
    return text + markdown_table(Table(title="", headers=headers, rows=tuple(rows), right=headers))


def _small(report: AccuracyReport) -> str:
    """Return the section on jobs that may be bound by the host."""
    others = report.scored_left_out
    headers = ["runs", "n", "mean", "bias", *(["mean, left out"] if others else []), *(["mean, unseen framework"] if report.small else [])]
    rows, means = [], []
    for title, holds in SMALL:
        runs = [row for row in report.scored if holds(row.labels)]
        if not runs:
            continue
        each = error_summary(title, runs)
        found = [each.mean]
        if others:
            found.append(error_summary(title, [row for row in others if holds(row.labels)]).mean)
        if report.small:
            hidden = [abs(report.small[row.id]) for row in runs if row.id in report.small]
            found.append(sum(hidden) / len(hidden) if hidden else math.nan)
        means.append(found)
        rows.append((title, str(len(runs)), _number(found[0]), f"{100 * each.bias:+.1f}", *map(_number, found[1:])))
    if not rows:
        return ""
    total = [sum(column) / len(column) for column in zip(*means, strict=True)]
    rows.append(("**mean over rows**", "", _number(total[0]), "", *map(_number, total[1:])))
    faster = [row.id for row in report.scored if row.labels.peak_share > 1.0]
    text = """## Small jobs

Jobs that may be bound by the host: a pass takes at least the launch time of its kernels (`perfmodel/cost/launches.py`), whose number
follows from the graph. Errors in percent; each row weighs one."""
    if faster:
        text += f" Left out: {', '.join(faster)}, which is faster in its source than its chips can multiply."
    return text + "\n\n" + markdown_table(Table(title="", headers=tuple(headers), rows=tuple(rows), right=tuple(headers[1:])))


def _intervals(report: AccuracyReport) -> str:
    headers = ["source", "runs", "coverage", "median width"]
    others = report.scored_left_out
    if others:
        headers.append("coverage, left out")
    rows = []
    for name in [*sorted({row.group for row in report.scored}), "all"]:
        own, left = ([row for row in part if name in (row.group, "all")] for part in (report.scored, others))
        summary = error_summary(name, own)
        if not summary.num_intervals:
            return ""
        unseen = [f"{error_summary(name, left).coverage:.0%}" if left else "-"] if others else []
        rows.append((name, f"{summary.num_intervals:,}", f"{summary.coverage:.0%}", _width(own), *unseen))
    rows.append(("mean over sources", "", _mean_coverage(report.scored), "", *([_mean_coverage(others)] if others else [])))
    text = """## Intervals

`perfmodel predict --interval` and the columns `step_time_low, step_time_high` of `validate` give an 80 % interval. It is based
on the errors of the most similar published runs of the same framework (chip, number of chips, precision). The spread over unseen
frameworks counts as three runs, and features without runs widen the interval (docs/trust.md, `strategies/residuals.yaml`). Coverage is the
share of runs inside the interval, with the quantiles of the *other* models; width is high / low - 1. Where the residuals come from fits
that did not see the run's model, *left out* is the valid column, and the other coverage is too high.

"""
    return text + markdown_table(Table(title="", headers=tuple(headers), rows=tuple(rows), right=tuple(headers[1:])))


def _mean_coverage(rows: Sequence[ValidationRow]) -> str:
    """Share of runs in their interval, each source weighing one."""
    shares = [error_summary(name, [row for row in rows if row.group == name]).coverage for name in sorted({row.group for row in rows})]
    return f"{sum(shares) / len(shares):.0%}"


def _width(rows: Sequence[ValidationRow]) -> str:
    widths = sorted(row.step_time_high / row.step_time_low - 1 for row in rows if not math.isnan(row.step_time_low))
    return f"{widths[len(widths) // 2]:.0%}" if widths else "-"


def _fitted(report: AccuracyReport) -> str:
    lines = [
        "## Fitted parameters",
        "",
        "Kernels and collectives are fitted to published kernel tables, never to training runs; only the parameters ship. Errors are",
        "medians on held-out shapes, unless marked *in sample*.",
        "",
    ]
    rows = []
    for name in list_calibrations():
        calibration = load_calibration(name)
        for part, error in calibration.errors.items():
            rows.append((name, part, f"{calibration.points.get(part, 0):,}", f"{100 * error:.1f}", calibration.date))
    headers = ("calibration", "part", "points", "error %", "date")
    lines += [markdown_table(Table(title="", headers=headers, rows=tuple(rows), right=headers[2:4]))]
    lines += ["", "Sources of the calibrations:", ""]
    lines += [f"- `{name}`: {' '.join(load_calibration(name).source.split())}." for name in list_calibrations()]
    lines += [
        "",
        "Framework defaults come from source code (`strategies/frameworks/*/habits.yaml`, each group with its source). Numbers fitted to",
        "runs are in `fitted.yaml` of the same folder, which `python -m lab.fitted` writes. The frameworks:",
        "",
    ]
    lines += [f"- `{name}`: {' '.join(load_profile(name).source.split()).rstrip('.')}." for name in list_profiles()]
    parts = [worth_text(report.ablations)] if report.ablations else []
    return "\n\n".join(["\n".join(lines), *parts, *([clocks_text(report.clocks)] if report.clocks else [])])


def _worst(report: AccuracyReport) -> str:
    worst = sorted(report.scored, key=lambda row: -abs(math.log1p(row.time_error)))[:_WORST]
    rows = tuple(
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
    )
    headers = ("run", "model", "chips", "plan", "measured s", "predicted s", "error %", "cause")
    return "\n".join(
        [
            f"## The {len(rows)} largest errors of scored runs",
            "",
            "Causes are inferred from the notes of the source or from similar runs. They enter no prediction.",
            "",
            markdown_table(Table(title="", headers=headers, rows=rows, right=headers[4:7])),
        ]
    )


def _others(report: AccuracyReport) -> str:
    result = report.result
    rest = [row for row in result.rows if not (row.is_scored or row.has_experts) and row.time_error == row.time_error]
    parts = ["## Not scored", ""]
    if rest:
        parts += [
            "Predicted with an assumption for an input that the source omits, or with a step time that is not meaningful:",
            "",
            markdown_table(_without_counts(errors_by(rest, "source"))),
            "",
        ]
    if result.reasons:
        parts += ["Not predicted:", "", markdown_table(reason_table(result))]
    return "\n".join(parts).rstrip() if len(parts) > 2 else ""


def _without_counts(summaries: Sequence[ErrorSummary]) -> Table:
    table = error_table("source", summaries)
    return Table(title="", headers=table.headers, rows=table.rows, right=table.right)


def _rebuild(report: AccuracyReport) -> str:
    first, *others = report.names
    left_out = " --left-out left_out.csv" if report.left_out else ""
    lines = [f"CASES={first}"]
    lines += [f'OTHERS="{" ".join(others)}"'] if others else []
    lines += ["python -m lab.left_out $CASES --out left_out.csv"] if report.left_out else []
    lines.append(f"python -m lab.residuals $CASES{left_out}")
    lines.append(f"python -m lab.accuracy $CASES{' $OTHERS' if others else ''}{left_out} --out docs/accuracy.md")
    commands = "\n".join(lines)
    return f"""## Regenerate this page

In a checkout, `make accuracy` prints the table of left-out figures and runs these commands:

```
{commands}
```

`perfmodel validate $CASES --by source,chip,model --out results.csv --plots figures` prints the same figures and writes them as data."""


def _pct(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def _number(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def write_report(cases: Sequence[Path], out: Path, *, left_out: Path | None = None) -> AccuracyReport:
    """Predict the cases and write the document, and its figures beside it."""
    if not out.absolute().parent.is_dir():
        raise InputError(f"out={one_line(out, 200)}: its folder does not exist; make it or choose another path")
    found = {} if left_out is None else read_left_out(left_out)
    result = validate_cases(cases, skip_broken_nvlink=True)
    every = [case for path in cases for case in read_cases(path)]
    known, kin = Strangers(), Strangers(leaves_family=True)
    runs = list(known.times(every))
    strangers = (figures_of(runs), figures_of(kin.times(every)))
    report = AccuracyReport(
        result=result,
        left_out=found,
        names=tuple(str(path) for path in cases),
        strangers=strangers,
        choices=choices_of(runs) if strangers[0] else None,
        outcomes=tuple(known.outcomes(every)) if strangers[0] else (),
        small={run.id: run.error for run in known.times(every, SMALL)},
        ablations=tuple(ablations(cases[0])) if strangers[0] else (),
        few=few_runs_figures(every) if strangers[0] else (),
        clocks=fitted_clocks(cases[0]) if strangers[0] else (),
    )
    if not report.scored:
        raise InputError("cases: none is a primary training run with a step time; there is nothing to report")
    write_figures(replace(result, rows=tuple(report.scored)), out.parent / "figures")
    write_atomically(out, document(report))
    return report


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("accuracy", __doc__, cases=False)
    parser.add_argument("cases", type=Path, nargs="+", metavar="CASES.jsonl", help="published runs, one JSON object a line")
    parser.add_argument("--left-out", type=Path, metavar="FILE.csv", help="predictions by fits that did not see the run's model")
    parser.add_argument("--out", type=Path, default=Path("docs/accuracy.md"), metavar="FILE.md")
    options = parser.parse_args(arguments)
    report = write_report(options.cases, options.out, left_out=options.left_out)
    print(f"{options.out}: {len(report.scored):,} scored runs of {report.result.num_rows:,} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
