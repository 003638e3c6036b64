"""`perfmodel validate`: published runs predicted from their inputs, and the errors of the predictions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import argument, command, option
from perfmodel.foundation.plain import picked
from perfmodel.foundation.resources import check_can_be_written
from perfmodel.foundation.words import Words
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Document, Text

if TYPE_CHECKING:
    from perfmodel.validation.judgement import ValidationResult

_STATISTICS = "mean median p90 bias"
_SERVING = "num_rows num_predicted overall by secondary second_hand num_suspect reasons"


@command(
    assumed=Words(
        Request,
        only="profile calibration",
        helps={"profile": "Predict every training run with this framework, such as MINE.yaml of `fit`; its own if left out."},
    ),
    output=options.PLAIN_OUTPUT,
)
def validate(
    cases: Annotated[list[Path], argument("CASES.jsonl...", "Published runs, one JSON object a line (or packed, .gz).")],
    *,
    out: Annotated[Path | None, option("FILE.csv", "One row for every case, seconds and bytes.")] = None,
    by: Annotated[
        str | None,
        option(
            "FIELD[,FIELD...]",
            "By source (if left out), chip, framework, model, size, chips, form, tier, precision, profile, experts or dispatcher; "
            "runs of serving by engine, concurrency or kind too.",
        ),
    ] = None,
    tier: Annotated[str, option("NAME", "Only cases of this tier, such as primary.")] = "",
    skip_broken_nvlink: Annotated[
        bool,
        typer.Option(
            "--skip-broken-nvlink",
            help="Leave runs out of the choice of plans whose notes give an all-reduce in the node of under 100 GB/s.",
        ),
    ] = False,
    plots: Annotated[Path | None, option("FOLDER", "Figures: predicted against measured, error by chips, its distribution.")] = None,
    assumed: Request,
    hide_framework: Annotated[
        bool,
        typer.Option(
            "--hide-framework", help="Predict training runs without the names of their frameworks: generic, made from all others."
        ),
    ] = False,
    output: Output,
) -> None:
    """Predict published runs from their inputs alone, and show the errors of time, memory, fit and choice of plan."""
    from perfmodel.validation.rows import case_rows
    from perfmodel.validation.run_labels import check_fields
    from perfmodel.validation.validate import SUMMED_BY
    from perfmodel.verbs.api import validate_cases

    if out is not None:
        check_can_be_written(out, "out")
    fields = ("source",) if by is None else check_fields(by.split(","), SUMMED_BY)
    total = sum(map(_count_lines, cases))
    with Progress("validate") as progress:
        result = validate_cases(
            cases,
            out=out,
            calibration=assumed.calibration,
            profile=assumed.profile,
            hide_framework=hide_framework,
            by=fields,
            tier=tier,
            skip_broken_nvlink=skip_broken_nvlink,
            plots=plots,
            progress=lambda done: progress.share(min(done / max(total, 1), 1.0)),
        )
    serving = result.serving
    content = {
        **picked(result, "num_rows num_predicted kinds overall sources by choices memories"),
        "experts": picked(result.experts, "num_releases overall by memories"),
        **picked(result, "fits framework_fits source_fits"),
        "scored": picked(result.scored, "num_runs overall by choices"),
        "reasons": result.reasons,
        "settings_passed_over": result.passed_over,
        **({} if serving is None else {"serving": picked(serving, _SERVING)}),
    }
    show(
        Document(
            content=lambda: _flat(content),
            blocks=lambda: chain(_blocks(result), options.Files().written(output, {"table": out, "figures": plots})),
            rows=lambda: case_rows(result.every_row),
        ),
        output,
    )
    result.check()


def _count_lines(path: Path) -> int:
    try:
        if not path.is_file():  # a pipe can be read once
            return 0
        with open(path, "rb") as stream:
            return sum(1 for _ in stream)
    except (OSError, ValueError):
        return 0  # the reader raises the error


def _flat(value: object) -> Any:
    """Return the object with error summaries in their `--json` form: of a step the metrics have prefixes, of a service names."""
    from perfmodel.validation.judgement import ErrorSummary, MemorySummary

    match value:
        case ErrorSummary(metrics={"step_time": times, "memory": memories}):
            of_memory = {f"memory_{name}": statistic for name, statistic in picked(memories, _STATISTICS).items()}
            return {
                **picked(value, "name num_rows num_predicted"),
                "num_times": times.count,
                **picked(times, _STATISTICS),
                "num_memories": memories.count,
                **of_memory,
                **picked(times, "num_intervals coverage"),
            }
        case ErrorSummary(metrics=metrics):
            of_metrics = {metric: picked(errors, "count median p90 mean bias coverage") for metric, errors in metrics.items()}
            return {**picked(value, "name num_rows num_predicted"), "metrics": of_metrics, "num_out": value.num_out}
        case MemorySummary(errors=errors):
            return {**picked(value, "name framework kind rank"), "num_rows": errors.count, **picked(errors, _STATISTICS)}
        case dict():
            return {name: _flat(entry) for name, entry in value.items()}
        case tuple():
            return list(map(_flat, value))
        case _:
            return value


def _blocks(result: ValidationResult) -> Iterator[Block]:
    from perfmodel.parallel.framework_ref import passed_over_line
    from perfmodel.validation.tables import choice_lines, fit_lines, headline, result_tables, serving_headline, serving_tables

    if result.rows or result.serving is None:
        yield Text(headline(result))
        yield from result_tables(result)
    if result.serving is not None:
        yield Text(serving_headline(result.serving), apart=bool(result.rows))
        yield from serving_tables(result.serving)
    settings = [f"{name} ({count:,} runs)" for name, count in result.passed_over.items()]
    for line in [*fit_lines(result.fits), *choice_lines(result.choices), *([passed_over_line(settings)] if settings else [])]:
        yield Text(line)
