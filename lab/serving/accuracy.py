"""Write docs/accuracy-serving.md: errors of serving predictions on published runs, in-sample and with models and chips left out.

python -m lab.serving.accuracy CASES.jsonl [--out docs/accuracy-serving.md]
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.pages import Section, page, percent_number, statistics_text, table_of_figures
from lab.serving.choices import ChoiceFigures, Point, choice_figures, points_of
from lab.serving.engines import read_rows, shipped_fits
from lab.serving.fitting import EngineFit, left_out_of
from lab.serving.residuals import ServingResidual, every_basis, factors, known_residuals, unknown_residuals
from lab.serving.saturation import Saturation, saturation_of
from lab.splits import Split, cross_validated
from perfmodel.foundation.grouping import grouped
from perfmodel.foundation.resources import write_atomically
from perfmodel.frameworks.engine import fitted_numbers
from perfmodel.parallel.interval import METRICS, interval_factors
from perfmodel.planner.result import LIMIT_HEADROOM
from perfmodel.validation.judgement import metric_errors, summarise_serving
from perfmodel.validation.rows import ServingRow
from perfmodel.validation.run_labels import by_label
from perfmodel.validation.statistics import ErrorStatistics, error_statistics
from perfmodel.validation.tables import WORDS
from perfmodel.validation.validate import CasePredictor

LeftOutRows = Mapping[str, ServingRow]
"""Runs by id, with the metrics as predicted by a fit that left their model or their chip out."""

Sections = Iterator[Section]

_DENSE_CHIPS = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-180gb")
_MARGINS = (0.0, 0.02, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAccuracy:
    """Contents of the page."""

    rows: tuple[ServingRow, ...]
    without_model: LeftOutRows
    without_chip: LeftOutRows
    choices: Mapping[str, ChoiceFigures]
    residuals: tuple[ServingResidual, ...]
    saturation: Saturation

    @property
    def scored(self) -> list[ServingRow]:
        return [row for row in self.rows if row.is_scored]


def measure(path: Path) -> ServingAccuracy:
    predictor = CasePredictor()
    rows = read_rows(path, predictor, as_served=True)
    fits = shipped_fits(rows, predictor)
    without_model, without_chip = (_left_out_rows(fits, by) for by in ("model", "chip"))
    return ServingAccuracy(
        rows=tuple(rows),
        without_model=without_model,
        without_chip=without_chip,
        choices=_choices({"shipped": points_of(rows), "model left out": points_of(_in_order(rows, without_model))}),
        residuals=(*known_residuals(fits, predictor), *unknown_residuals(fits, predictor)),
        saturation=saturation_of(rows, predictor),
    )


def _left_out_rows(fits: Mapping[str, EngineFit], by: str) -> dict[str, ServingRow]:
    left_out: dict[str, ServingRow] = {}
    for row, metric, log in left_out_of(fits, by):
        predicted = left_out[row.id].predicted if row.id in left_out else {}
        left_out[row.id] = replace(row, predicted={**predicted, metric: row.case.measured(metric) * math.exp(log)})
    return left_out


def _in_order(rows: Sequence[ServingRow], left_out: LeftOutRows) -> list[ServingRow]:
    return [left_out[row.id] for row in rows if row.id in left_out]


def _choices(points: Mapping[str, Sequence[Point]]) -> dict[str, ChoiceFigures]:
    """Return the figures with the headroom of a search, and with less and more of it."""
    figures = {name: choice_figures(group, margin=LIMIT_HEADROOM) for name, group in points.items()}
    for name, group in points.items():
        figures |= {f"{name}, headroom {margin:.0%}": choice_figures(group, margin=margin) for margin in _MARGINS}
    return figures


def document(accuracy: ServingAccuracy) -> str:
    """Return the page."""
    parts: Sequence[Callable[[ServingAccuracy], Sections]] = (
        _introduction, _main_table, _static, _second_hand, _saturation, _plan_choice, _by_label, _intervals, _engines, _not_scored,
    )  # fmt: skip
    return page("accuracy-serving", [*(section for part in parts for section in part(accuracy)), ("rebuild", {})])


def _introduction(accuracy: ServingAccuracy) -> Sections:
    counts = {"points": len(accuracy.rows), "predicted": sum(row.is_predicted for row in accuracy.rows), "scored": len(accuracy.scored)}
    yield "introduction", {name: f"{count:,}" for name, count in counts.items()}


_LEFT_OUT = ("runs", "median", "p90", "bias", "median, model left out", "p90", "median, chip left out", "p90")


def _main_table(accuracy: ServingAccuracy) -> Sections:
    kinds = {
        kind: [row for row in accuracy.scored if row.kind == kind] for kind in ("serving", "static_batch", "max_throughput", "ttft_only")
    }
    serving = kinds["serving"]
    dense = [row for row in serving if row.labels.experts == "dense"]
    lines = (
        ("TPOT, dense models on H100, H200, B200", [row for row in dense if row.labels.chip in _DENSE_CHIPS], "tpot"),
        ("TPOT, mixture-of-experts models", [row for row in serving if row.labels.experts != "dense"], "tpot"),
        ("TPOT, all", serving, "tpot"),
        ("TTFT, dense models", dense, "ttft"),
        ("TTFT, all", serving, "ttft"),
        ("request latency, all", serving, "request_latency"),
        ("static batches (latency)", kinds["static_batch"], "request_latency"),
        ("maximum load (tokens/s)", kinds["max_throughput"], "tokens_per_second"),
        ("TTFT of a static batch", kinds["ttft_only"], "ttft"),
    )
    yield "main", {"table": table_of_figures(("what", *_LEFT_OUT), [_line(accuracy, *line) for line in lines])}


def _line(accuracy: ServingAccuracy, name: str, rows: Sequence[ServingRow], metric: str) -> tuple[str, ...]:
    shipped, model, chip = _errors(accuracy, rows, metric)
    left_out = (text for errors in (model, chip) for text in statistics_text(errors, "median p90").values())
    return (name, f"{shipped.count:,}", *statistics_text(shipped, "median p90 bias").values(), *left_out)


def _errors(accuracy: ServingAccuracy, rows: Sequence[ServingRow], metric: str) -> Iterator[ErrorStatistics]:
    """Yield the errors of a metric as shipped, with the model left out and with the chip left out."""
    for some in (rows, *(_in_order(rows, left_out) for left_out in (accuracy.without_model, accuracy.without_chip))):
        yield metric_errors(some, metric)


def _static(accuracy: ServingAccuracy) -> Sections:
    lines = []
    for kind, metric, suffix in (
        ("static_batch", "request_latency", ""),
        ("max_throughput", "tokens_per_second", " (tokens/s at maximum load)"),
    ):
        scored = [row for row in accuracy.scored if row.kind == kind]
        groups = grouped(scored, lambda row: (row.labels.source, row.labels.engine, row.labels.chip))
        lines += [_line(accuracy, ", ".join(key) + suffix, groups[key], metric) for key in sorted(groups)]
    yield "static", {"table": table_of_figures(("source, engine, chip", *_LEFT_OUT), lines)}


def _second_hand(accuracy: ServingAccuracy) -> Sections:
    yield "second_hand", {}
    rows = [row for row in accuracy.rows if row.is_second_hand and row.is_predicted]
    lines = [
        (
            row.labels.model,
            row.labels.chip,
            str(row.planned.layout.to_dict()["tp"] if row.planned else ""),
            f"{row.case.measured('request_latency'):.3f}",
            f"{row.predicted['request_latency']:.3f}",
            f"{100 * row.error('request_latency'):+.1f}",
        )
        for row in rows
    ]
    if lines:
        of = error_statistics([row.error("request_latency") for row in rows])
        table = table_of_figures(("model", "chip", "tp", "measured", "predicted", "error %"), lines)
        yield "second_hand_table", {"table": table, **statistics_text(of, "mean median bias")}


def _saturation(accuracy: ServingAccuracy) -> Sections:
    yield "saturation", {}
    full = accuracy.saturation.full
    errors = [run.predicted / run.running - 1.0 for run in full]
    lines = [
        (
            *(getattr(run.row.labels, name) for name in ("engine", "model", "chip")),
            f"{run.clients:.0f}",
            f"{run.running:.1f}",
            f"{run.predicted:.1f}",
            f"{100 * error:+.1f}",
        )
        for run, error in zip(full, errors, strict=True)
    ]
    if lines:
        of = error_statistics(errors)
        queues = error_statistics([error for run, error in zip(full, errors, strict=True) if run.is_mostly_queue])
        yield (
            "saturation_table",
            {
                "table": table_of_figures(("engine", "model", "chip", "clients", "measured", "predicted", "error %"), lines),
                "median": percent_number(of.median),
                "count": f"{of.count:,}",
                "queue_median": percent_number(queues.median),
                "queues": f"{queues.count:,}",
                "others": f"{accuracy.saturation.num_others:,}",
                "limited": f"{accuracy.saturation.num_limited:,}",
            },
        )
    static = [row for row in accuracy.scored if row.kind == "static_batch" and row.planned is not None]
    waves = [row for row in static if row.planned and (row.planned.job.concurrency or 0) > row.max_sequences]
    of = error_statistics([row.error("request_latency") for row in waves])
    out = sum(row.predicted_fits is False for row in accuracy.scored)
    yield "waves", {"count": f"{of.count:,}", **statistics_text(of, "median p90 bias"), "out": f"{out:,}"}


def _plan_choice(accuracy: ServingAccuracy) -> Sections:
    head = ("engine numbers", "cases", "mean regret", "median regret", "broken", "same number of chips as the best", "median point")
    lines = [
        (
            name,
            f"{figures.num_cases:,}",
            *map(percent_number, (figures.mean_regret, figures.median_regret, figures.broken, figures.same_chips, figures.median_point)),
        )
        for name, figures in accuracy.choices.items()
    ]
    yield "choice", {"headroom": f"{100 * LIMIT_HEADROOM:g}", "table": table_of_figures(head, lines)}


def _by_label(accuracy: ServingAccuracy) -> Sections:
    tables = []
    serving = [row for row in accuracy.scored if row.kind == "serving"]
    for field in ("engine", "framework", "chip", "model", "precision", "concurrency"):
        lines = []
        for label, rows in by_label(serving, field).items():
            cells = []
            for metric in METRICS[:3]:
                shipped, left_out, _ = _errors(accuracy, rows, metric)
                medians = f"{percent_number(shipped.median)} ({percent_number(left_out.median)})"
                cells += [medians, percent_number(shipped.p90), percent_number(shipped.bias)]
            lines.append((label, f"{len(rows):,}", *cells))
        head = (field, "runs", *(f"{WORDS[metric]} {word}" for metric in METRICS[:3] for word in ("median", "p90", "bias")))
        tables.append(table_of_figures(head, lines))
    yield "labels", {"tables": "\n\n".join(tables)}


def _intervals(accuracy: ServingAccuracy) -> Sections:
    lines = []
    for basis in every_basis():
        for metric in METRICS:
            shipped = interval_factors(basis).get(metric)
            of = [residual for residual in accuracy.residuals if residual.basis == basis and residual.metric == metric]
            if shipped is None or not of:
                continue
            held = _coverage(accuracy.residuals, of)
            lines.append((basis.key, WORDS[metric], f"{shipped[0]:.2f} to {shipped[1]:.2f}", f"{len(of):,}", percent_number(held)))
    yield "intervals", {"table": table_of_figures(("basis", "metric", "interval", "residuals", "coverage"), lines)}


def _coverage(residuals: Sequence[ServingResidual], of: Sequence[ServingResidual]) -> float:
    """Return the share of residuals in the interval that the residuals of other models give."""

    def held(split: Split) -> list[bool]:
        first = of[split.held_out[0]]
        bounds = factors([residual for residual in residuals if residual.row.labels.model != split.label], first.basis, first.metric)
        values = [of[index].value for index in split.held_out]
        return [bounds is not None and math.log(bounds[0]) <= value <= math.log(bounds[1]) for value in values]

    return float(cross_validated([residual.row.labels.model for residual in of], held).mean())


def _engines(accuracy: ServingAccuracy) -> Sections:
    lines = [
        (
            engine,
            number,
            str(fit["value"]),
            f"{fit['low']} to {fit['high']}",
            *(str(fit[name]) for name in ("runs", "models", "chips")),
        )
        for engine, numbers in sorted(fitted_numbers().items())
        for number, fit in numbers.items()
    ]
    yield "engines", {"table": table_of_figures(("engine", "number", "value", "range", "runs", "models", "chips"), lines)}


def _not_scored(accuracy: ServingAccuracy) -> Sections:
    faults = [row.case.suspect for row in accuracy.rows if row.case.suspect and not row.is_second_hand]
    suspect = Counter(re.sub(r"\d+(\.\d+)?", "N", fault)[:110] for fault in faults)  # without the numbers of one run
    result = summarise_serving(accuracy.rows)
    errors = result.secondary.metrics.items()
    lines = [(WORDS[metric], f"{of.count:,}", *statistics_text(of, "median p90 bias").values()) for metric, of in errors]
    yield (
        "not_scored",
        {
            "secondary": f"{result.secondary.num_predicted:,}",
            "metrics": table_of_figures(("metric", "runs", "median", "p90", "bias"), lines),
            "noted": f"{sum(bool(row.case.first_token_note) for row in accuracy.rows):,}",
            "suspect": table_of_figures(("runs", "reason"), [(f"{count:,}", reason) for reason, count in suspect.most_common(12)]),
            "missing": table_of_figures(("runs", "reason"), [(f"{count:,}", reason) for reason, count in result.reasons.items()]),
        },
    )


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("serving.accuracy", __doc__)
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.md", help="print it if left out")
    options = parser.parse_args(arguments)
    with np.errstate(all="ignore"):
        text = document(measure(options.cases))
    if options.out is None:
        print(text, end="")
    else:
        write_atomically(options.out, text)
        print(options.out)


if __name__ == "__main__":
    sys.exit(main())
