"""Write docs/accuracy-serving.md: errors of serving predictions on published runs, in-sample and with models and chips left out.

python -m lab.serving.accuracy CASES.jsonl [--out docs/accuracy-serving.md]
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.command import command_parser, exits_on_errors
from lab.serving.choices import ChoiceFigures, Point, choice_figures, points_of
from lab.serving.engines import elsewhere, read_rows, shipped_fits
from lab.serving.fitting import EngineFit, left_out_residuals
from lab.serving.residuals import ServingResidual, every_footing, factors, known_residuals, unknown_residuals
from lab.serving.saturation import Saturation, saturation_of
from perfmodel.foundation.resources import write_atomically
from perfmodel.frameworks.engine import fitted_numbers
from perfmodel.frameworks.serving_intervals import METRICS, interval_factors
from perfmodel.planner.serving.result import LIMIT_HEADROOM
from perfmodel.validation.serving.estimators import Estimators
from perfmodel.validation.serving.judgement import error_statistics
from perfmodel.validation.serving.rows import ServingRow, label_order
from perfmodel.validation.serving.tables import WORDS

Errors = Mapping[tuple[str, str], float]
"""(id of a run, metric) -> predicted / measured - 1."""

_DENSE_CHIPS = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-180gb")
_MARGINS = (0.0, 0.02, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAccuracy:
    """Everything that the document is made from."""

    rows: tuple[ServingRow, ...]
    shipped: Errors
    without_model: Errors
    without_chip: Errors
    choices: Mapping[str, ChoiceFigures]
    residuals: tuple[ServingResidual, ...]
    saturation: Saturation

    @property
    def scored(self) -> list[ServingRow]:
        return [row for row in self.rows if row.is_scored]


def measure(path: Path) -> ServingAccuracy:
    estimators = Estimators()
    rows = read_rows(path, estimators, as_served=True)
    shipped = {(row.id, metric): row.error(metric) for row in rows for metric in METRICS if row.counts(metric)}
    fits = shipped_fits(rows, estimators)
    without = {by: left_out_errors(fits, by) for by in ("model", "chip")}
    metrics = {row.id: row.predicted for row in rows if row.is_predicted}
    return ServingAccuracy(
        rows=tuple(rows),
        shipped=shipped,
        without_model=without["model"],
        without_chip=without["chip"],
        choices=_choices({"shipped": points_of(rows, metrics), "model left out": points_of(rows, _moved(rows, without["model"]))}),
        residuals=(*known_residuals(fits, estimators), *unknown_residuals(fits, estimators)),
        saturation=saturation_of(rows, estimators),
    )


def _choices(points: Mapping[str, Sequence[Point]]) -> dict[str, ChoiceFigures]:
    """Return the figures with the headroom of a search, and with less and more of it."""
    found = {name: choice_figures(each, margin=LIMIT_HEADROOM) for name, each in points.items()}
    for name, each in points.items():
        found |= {f"{name}, headroom {margin:.0%}": choice_figures(each, margin=margin) for margin in _MARGINS}
    return found


def left_out_errors(fits: Mapping[str, EngineFit], by: str) -> dict[tuple[str, str], float]:
    found = {}
    for name, fit in fits.items():
        values, _ = left_out_residuals(fit, by, elsewhere(fits, name))
        for target, value in zip(fit.targets, values, strict=True):
            found[fit.rows[target.row].id, target.metric] = math.expm1(float(value))
    return found


def _moved(rows: Sequence[ServingRow], errors: Errors) -> dict[str, dict[str, float]]:
    """The metrics of runs as predicted with these errors."""
    found = {}
    for row in rows:
        moved = {metric: row.measured(metric) * (1.0 + errors[row.id, metric]) for metric in METRICS if (row.id, metric) in errors}
        if {"tpot", "request_latency"} <= set(moved):
            found[row.id] = moved
    return found


# ---------------------------------------------------------------------------------------------------------------------------------
# The document
# ---------------------------------------------------------------------------------------------------------------------------------


def document(found: ServingAccuracy) -> str:
    sections: Sequence[Callable[[ServingAccuracy], str]] = (
        _introduction, _main_table, _static, _second_hand, _saturation, _plan_choice, _by_label, _intervals, _engines,
        _not_scored, _rebuild,
    )  # fmt: skip
    return "\n\n".join(section(found) for section in sections) + "\n"


def _introduction(found: ServingAccuracy) -> str:
    predicted = sum(row.is_predicted for row in found.rows)
    return f"""# Accuracy of serving

Errors of predicted serving times and throughput on published runs. One command writes this page (last section); do not edit it by hand.

{len(found.rows):,} points are read, {predicted:,} predicted and {len(found.scored):,} scored: the primary ones that are not marked as
suspect. Errors are |predicted / measured - 1| in percent. *Model left out* and *chip left out*: the engine's numbers are fitted to all
its runs except those of the run's model or chip. Kernels and collectives are never fitted to serving runs."""


def _main_table(found: ServingAccuracy) -> str:
    serving = [row for row in found.scored if row.kind == "serving"]
    dense = [row for row in serving if row.labels["experts"] == "dense"]
    routed = [row for row in serving if row.labels["experts"] != "dense"]
    known = [row for row in dense if row.labels["chip"] in _DENSE_CHIPS]
    lines = (
        ("TPOT, dense models on H100, H200, B200", known, "tpot"),
        ("TPOT, mixture-of-experts models", routed, "tpot"),
        ("TPOT, all", serving, "tpot"),
        ("TTFT, dense models", dense, "ttft"),
        ("TTFT, all", serving, "ttft"),
        ("request latency, all", serving, "request_latency"),
        ("static batches (latency)", [row for row in found.scored if row.kind == "static_batch"], "request_latency"),
        ("maximum load (tokens/s)", [row for row in found.scored if row.kind == "max_throughput"], "tokens_per_second"),
        ("TTFT of a static batch", [row for row in found.scored if row.kind == "ttft_only"], "ttft"),
    )
    head = ("what", "runs", "median", "p90", "bias", "median, model left out", "p90", "median, chip left out", "p90")
    return "## Latency and throughput\n\n" + _table(head, [_line(found, *each) for each in lines])


def _line(found: ServingAccuracy, name: str, rows: Sequence[ServingRow], metric: str) -> tuple[str, ...]:
    ids = [(row.id, metric) for row in rows if row.counts(metric)]
    own, model, chip = (error_statistics([errors[each] for each in ids if each in errors]) for errors in _sets(found))
    return (
        name,
        f"{own.count:,}",
        *map(_percent, (own.median, own.p90, own.bias, model.median, model.p90, chip.median, chip.p90)),
    )


def _sets(found: ServingAccuracy) -> tuple[Errors, Errors, Errors]:
    return found.shipped, found.without_model, found.without_chip


def _static(found: ServingAccuracy) -> str:
    head = ("source, engine, chip", "runs", "median", "p90", "bias", "median, model left out", "p90", "median, chip left out", "p90")
    lines = [_line(found, ", ".join(key), rows, "request_latency") for key, rows in _by_source(found, "static_batch")]
    lines += [
        _line(found, f"{source}, {engine}, {chip} (tokens/s at maximum load)", rows, "tokens_per_second")
        for (source, engine, chip), rows in _by_source(found, "max_throughput")
    ]
    return "## Static batches and maximum load, by source\n\n" + _table(head, lines)


def _by_source(found: ServingAccuracy, kind: str) -> list[tuple[tuple[str, str, str], list[ServingRow]]]:
    """Scored runs of a kind by source, engine and chip, in that order."""
    groups: dict[tuple[str, str, str], list[ServingRow]] = {}
    for row in found.scored:
        if row.kind == kind:
            groups.setdefault((row.labels["source"], row.labels["engine"], row.labels["chip"]), []).append(row)
    return sorted(groups.items(), key=lambda item: item[0])


def _second_hand(found: ServingAccuracy) -> str:
    rows = [row for row in found.rows if row.is_second_hand and row.is_predicted]
    errors = [row.error("request_latency") for row in rows]
    text = """## Llama-2 latencies of Kundu et al. 2024

22 latencies of Llama-2 with 200 input and 200 output tokens, in seconds. They come from a secondary source, so they are not scored with
the others, and nothing is fitted to them."""
    if not rows:
        return text
    lines = [
        (
            row.labels["model"],
            row.labels["chip"],
            str(row.planned.plan.tp if row.planned else ""),
            f"{row.served.request_latency:.3f}",
            f"{row.predicted['request_latency']:.3f}",
            f"{100 * row.error('request_latency'):+.1f}",
        )
        for row in rows
    ]
    own = error_statistics(errors)
    summary = f"Mean {_percent(own.mean)} %, median {_percent(own.median)} %, bias {_percent(own.bias)} %."
    return f"{text}\n\n{_table(('model', 'chip', 'tp', 'measured', 'predicted', 'error %'), lines)}\n\n{summary}"


def _saturation(found: ServingAccuracy) -> str:
    full, limited = found.saturation.full, found.saturation.num_limited
    errors = [run.predicted / run.running - 1.0 for run in full]
    lines = [
        (
            *(run.row.labels[name] for name in ("engine", "model", "chip")),
            f"{run.clients:.0f}",
            f"{run.running:.1f}",
            f"{run.predicted:.1f}",
            f"{100 * (run.predicted / run.running - 1):+.1f}",
        )
        for run in full
    ]
    waves = [
        row for row in found.scored
        if row.kind == "static_batch" and row.planned is not None and (row.planned.job.concurrency or 0) > row.max_sequences
    ]  # fmt: skip
    over = error_statistics([row.error("request_latency") for row in waves])
    text = """## Running sequences when the KV cache is full

Serving runs in which at least a tenth of the clients waited and the KV cache is predicted to be full. Both figures are clients x (1 -
TTFT / latency), by Little's law. The measured one uses mean lengths. The predicted one simulates the same benchmark: all clients start at
once on an empty engine, and each sends ten requests. An engine admits a request when the cache has room for its prompt or, with
`reserves_answers`, for the whole answer too. When the cache runs full, the latest requests are preempted and recomputed."""
    table = _table(("engine", "model", "chip", "clients", "measured", "predicted", "error %"), lines) if lines else ""
    own = error_statistics(errors)
    queues = error_statistics([run.predicted / run.running - 1.0 for run in full if run.is_mostly_queue])
    summary = (
        f"""Median error: {_percent(own.median)} % over {own.count:,} runs, {_percent(queues.median)} % over the {queues.count:,} runs in
which requests waited longer than they ran. {found.saturation.num_others:,} more runs with waiting clients are not in the table. Either all
clients are predicted to fit in the cache (most of them wait for other prompts), or the run has the same number of running requests under
every plan (an admission limit that is not stated; {limited:,} runs)."""
        if lines
        else ""
    )
    tail = f"""Static batches that are predicted to run in waves because the cache is full ({over.count:,} runs): median latency error
{_percent(over.median)} %, 90th percentile {_percent(over.p90)} %, bias {_percent(over.bias)} %. All scored runs ran; the number predicted
not to fit is {sum(row.predicted_fits is False for row in found.scored):,}."""
    return "\n\n".join(each for each in (text, table, summary, tail) if each)


def _plan_choice(found: ServingAccuracy) -> str:
    text = f"""## Choice of plan and load under a TPOT limit

Groups of runs that differ in plan and load only, under six TPOT limits (10 to 100 ms). The chosen point has the most output tokens/s per
chip among those predicted to meet the limit. Broken: share of choices whose measured TPOT exceeds the limit. Regret: how much less the
other choices yield than the measured best under the limit. Median point: regret of the median point that meets the limit. A choice is the
point predicted fastest for its load, so its prediction is optimistic. As in a search, the prediction has to stay
{100 * LIMIT_HEADROOM:g} % below the limit, unless a row states another headroom."""
    head = ("engine numbers", "cases", "mean regret", "median regret", "broken", "same number of chips as the best", "median point")
    lines = [
        (
            name,
            f"{each.num_cases:,}",
            *map(_percent, (each.mean_regret, each.median_regret, each.broken, each.same_chips, each.median_point)),
        )
        for name, each in found.choices.items()
    ]
    return f"{text}\n\n{_table(head, lines)}"


def _by_label(found: ServingAccuracy) -> str:
    parts = ["## By engine, chip, model, precision, clients\n\nServing runs with the shipped numbers; in brackets with the model left out."]
    serving = [row for row in found.scored if row.kind == "serving"]
    for field in ("engine", "framework", "chip", "model", "precision", "concurrency"):
        labels = sorted({row.labels[field] for row in serving}, key=label_order)
        lines = []
        for label in labels:
            rows = [row for row in serving if row.labels[field] == label]
            lines.append((label, f"{len(rows):,}", *(cell for metric in METRICS[:3] for cell in _pair(found, rows, metric))))
        head = (field, "runs", *(f"{WORDS[metric]} {word}" for metric in METRICS[:3] for word in ("median", "p90", "bias")))
        parts.append(_table(head, lines))
    return "\n\n".join(parts)


def _pair(found: ServingAccuracy, rows: Sequence[ServingRow], metric: str) -> tuple[str, str, str]:
    ids = [(row.id, metric) for row in rows if row.counts(metric)]
    own, left = (error_statistics([errors[each] for each in ids if each in errors]) for errors in _sets(found)[:2])
    return f"{_percent(own.median)} ({_percent(left.median)})", _percent(own.p90), _percent(own.bias)


def _intervals(found: ServingAccuracy) -> str:
    text = """## Intervals

80 % intervals of a prediction, as factors: quantiles of measured / predicted over scored runs, each predicted with its model left out.
For an unknown engine, each of today's engines is predicted with the mean of the other two. A set with fewer than 20 residuals uses the
next wider set. *Coverage*: share of runs inside the interval, computed without the run's model."""
    lines = []
    for footing in every_footing():
        for metric in METRICS:
            shipped = interval_factors(footing).get(metric)
            of = [each for each in found.residuals if each.footing == footing and each.metric == metric]
            if shipped is None or not of:
                continue
            held = _coverage(found.residuals, of)
            lines.append((footing.key, WORDS[metric], f"{shipped[0]:.2f} to {shipped[1]:.2f}", f"{len(of):,}", _percent(held)))
    return f"{text}\n\n{_table(('basis', 'metric', 'interval', 'residuals', 'coverage'), lines)}"


def _coverage(residuals: Sequence[ServingResidual], of: Sequence[ServingResidual]) -> float:
    held = 0
    for model in {each.row.labels["model"] for each in of}:
        own = [each for each in of if each.row.labels["model"] == model]
        made = factors([each for each in residuals if each.row.labels["model"] != model], own[0].footing, own[0].metric)
        if made is not None:
            held += sum(math.log(made[0]) <= each.value <= math.log(made[1]) for each in own)
    return held / len(of)


def _engines(found: ServingAccuracy) -> str:
    text = """## Fitted numbers of engines

The numbers of an engine are fitted jointly to all its scored runs (`python -m lab.serving.engines`). The range holds 80 % of the
values of fits that leave one model out. Everything else about an engine comes from its source code (`strategies/engines/`)."""
    lines = [
        (engine, number, str(told["value"]), f"{told['low']} to {told['high']}",
         str(told["runs"]), str(told["models"]), str(told["chips"]))
        for engine, numbers in sorted(fitted_numbers().items())
        for number, told in numbers.items()
    ]  # fmt: skip
    return f"{text}\n\n{_table(('engine', 'number', 'value', 'range', 'runs', 'models', 'chips'), lines)}"


def _not_scored(found: ServingAccuracy) -> str:
    suspect = Counter(_reason(row.served.suspect) for row in found.rows if row.served.suspect and not row.is_second_hand)
    missing = Counter(row.reason for row in found.rows if not row.is_predicted)
    secondary = [row for row in found.rows if row.tier != "primary" and not row.served.suspect and row.is_predicted]
    noted = sum(bool(row.served.ttft_note) for row in found.rows)
    lines = [(WORDS[metric], *_statistics(secondary, metric)) for metric in METRICS]
    return "\n\n".join(
        [
            "## Not scored",
            f"Secondary runs (unknown input, speculative decoding, disaggregated workers, admission limit): {len(secondary):,}.",
            _table(("metric", "runs", "median", "p90", "bias"), lines),
            f"TTFT of {noted:,} runs is not scored: by its source it is mostly queueing or start-up. Suspect runs, by reason:",
            _table(("runs", "reason"), [(f"{count:,}", reason) for reason, count in suspect.most_common(12)]),
            "Not predicted:",
            _table(("runs", "reason"), [(f"{count:,}", reason) for reason, count in missing.most_common()]),
        ]
    )


def _reason(text: str) -> str:
    """Without what is particular to one run."""
    return re.sub(r"\d+(\.\d+)?", "N", text)[:110]


def _statistics(rows: Sequence[ServingRow], metric: str) -> tuple[str, ...]:
    own = error_statistics([row.error(metric) for row in rows if row.counts(metric)])
    return f"{own.count:,}", _percent(own.median), _percent(own.p90), _percent(own.bias)


def _rebuild(found: ServingAccuracy) -> str:
    return """## Regenerate this page

```text
CASES=tests/golden/published_serving.jsonl.gz
python -m lab.serving.engines $CASES
python -m lab.serving.residuals $CASES
python -m lab.serving.accuracy $CASES --out docs/accuracy-serving.md
```

`perfmodel validate CASES.jsonl --by engine,model,concurrency` prints such tables for any file of runs."""


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:.1f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    numeric = [all(re.fullmatch(r"[-+]?[\d.,]*( \([\d.]*\))?", line[i]) for line in lines) for i in range(len(head))]
    rule = ["---:" if each else "---" for each in numeric]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> int:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
