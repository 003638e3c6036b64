"""Errors of predictions for models that no fit has seen: the table of issue "Accuracy", from one command.

    python -m lab.left_out CASES.jsonl [--kernels FOLDER] [--out FILE.csv | FILE.json] [--constants]

Each run is predicted with its framework's constants as fitted to all runs but those of its model (models of one architecture and size
under two names are one). Constants that another framework's fit lends are fitted without that model too. A source of one model is
predicted with constants that related fits lend and with the runs of other models of its framework. The 80 % intervals are those of
`perfmodel validate` around these predictions. With `--kernels` the lines of kernels follow (`lab.kernels.cross_validate`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab import accuracy_lines as rules
from lab.accuracy import AccuracyReport
from lab.cases import read_runs
from lab.command import command_parser, exits_on_errors
from lab.kernels.cross_validate import cross_validate, summary
from lab.left_out.fits import LeftOut, PredictedRun
from lab.pages import percent, statistics_text
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.resources import write_atomically
from perfmodel.foundation.text import columns_text
from perfmodel.report.document import csv_text
from perfmodel.validation.judgement import error_summary
from perfmodel.validation.plan_choice import PlanChoices, plan_choices
from perfmodel.validation.statistics import error_statistics
from perfmodel.validation.validate import validate_cases

LINES = (
    *rules.LINES,
    rules.AccuracyLine(
        title="(NVIDIA's recipes, bf16; recomputation unknown)",
        holds=lambda labels: labels.profile == "nemo" and not rules.is_narrow(labels),
        counts=False,
    ),
    rules.AccuracyLine(
        title="(NVIDIA's recipes, fp8 and narrower)",
        holds=lambda labels: labels.profile == "nemo" and rules.is_narrow(labels),
        counts=False,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutTable:
    """Errors of predictions by fits that did not see the model of a run: predicted / measured - 1 by line, and choices of plan."""

    lines: Mapping[rules.AccuracyLine, Sequence[float]]
    choices: PlanChoices

    def errors(self, title: str) -> Sequence[float]:
        return next(errors for line, errors in self.lines.items() if line.title == title)


def judge(predictions: Sequence[PredictedRun]) -> LeftOutTable:
    lines = rules.errors_by_line([(prediction.run.choice.labels, prediction.error) for prediction in predictions], LINES)
    if rules.EVERY not in lines:
        raise InputError("cases: none of the sources of the table is among them; give the file of published training runs")
    choices = [
        replace(prediction.run.choice, predicted=prediction.predicted) for prediction in predictions if prediction.run.source == "nanotron"
    ]
    return LeftOutTable(lines=lines, choices=plan_choices(choices, skip_broken_nvlink=True))


def table_text(table: LeftOutTable) -> str:
    rows: list[tuple[str, ...]] = [("what", "runs", "mean", "median", "p90", "max", "bias", "others")]
    for line, errors in table.lines.items():
        of = error_statistics(errors)
        rows.append((line.title, str(of.count), *statistics_text(of, "mean median p90 largest bias", percent).values(), line.others))
    rows.append(("median over sources of their means", "", percent(rules.median_of_means(table.lines)), *[""] * 5))
    overall = table.choices.overall
    choice = (
        f"plan choice, nanotron: {overall.num_groups} groups of at least four plans, without {table.choices.num_broken_nvlink} runs on "
        f"broken NVLink: mean regret {percent(overall.mean_regret)}, largest {percent(overall.largest_regret)}; best of the first three "
        f"within 3 % of the best in {percent(overall.near_best_fraction)} of groups; rank correlation {overall.rank_correlation:.2f}"
    )
    return f"{columns_text(rows)}\n{choice}"


def intervals_text(cases: Path, predictions: Sequence[PredictedRun]) -> str:
    """Return the share of counted rows in the 80 % interval around their prediction."""
    result = validate_cases([cases], skip_broken_nvlink=True)
    left_out = {item.run.id: item.predicted for item in predictions if rules.EVERY.holds(item.run.choice.labels)}
    report = AccuracyReport(result=result, left_out=left_out, names=(cases.name,))
    found_in = error_summary("all", report.scored_left_out).times
    return f"80 % intervals hold {percent(found_in.coverage)} of {found_in.num_intervals} runs"


def kernels_text(folder: Path) -> str:
    """Return the median errors of kernels whose shapes, or whose chip, no fit has seen."""
    rows = list(cross_validate(folder))
    lines = ["kernels, median error over chips (largest), by fits that did not see a group of shapes or the chip:"]
    for part, middle, largest in summary(rows):
        lines.append(f"  {part:44} {percent(middle):>7} ({percent(largest)})")
    return "\n".join(lines)


def rows_text(predictions: Sequence[PredictedRun], *, as_json: bool) -> str:
    """Return one row for every run. [s]"""
    rows = [
        {
            "id": prediction.run.id,
            "source": prediction.run.source,
            "model": prediction.run.choice.labels.model,
            "measured_step_time": prediction.run.measured,
            "predicted_step_time": prediction.predicted,
            "fold": prediction.fold,
        }
        for prediction in predictions
    ]
    return json.dumps(rows, indent=1) + "\n" if as_json else csv_text(rows)


def constants_text(fits: LeftOut) -> str:
    """Return the constants fitted to all runs, and their range with one model left out."""
    lines = []
    for name in fits.fits:
        fit = fits.fitted(name)
        if not fit.num_runs:
            continue
        models = dict.fromkeys(fits.runs[index].model for index in fits.rows_of(name))
        others = [fits.fitted(name, without=model).values for model in models]
        lines.append(f"{name}: {fit.num_runs} runs of {len(models)} models, mean error of the fit itself {percent(fit.mean_error)}")
        for constant, value in fit.values.items():
            low, high = min(values[constant] for values in others), max(values[constant] for values in others)
            lines.append(f"  {constant:40} {value:<10.4g} {low:.4g} to {high:.4g} with one model left out")
    return "\n".join(lines)


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("left_out", __doc__)
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="published kernel tables: the lines of kernels too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="every run with its prediction: .csv or .json")
    parser.add_argument("--constants", action="store_true", help="the fitted constants too")
    options = parser.parse_args(arguments)
    if options.out is not None and options.out.suffix not in (".csv", ".json"):
        raise InputError(f"out={options.out}: must end in .csv or .json; name it so")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise InputError(f"out={options.out}: its folder does not exist; make it or choose another path")
    fits = LeftOut.of_times(read_runs(options.cases))
    predictions = fits.predictions()
    print(table_text(judge(predictions)))
    print(intervals_text(options.cases, predictions))
    if options.kernels is not None:
        print(kernels_text(options.kernels))
    if options.constants:
        print("\n" + constants_text(fits))
    if options.out is not None:
        write_atomically(options.out, rows_text(predictions, as_json=options.out.suffix == ".json"))
