"""`perfmodel validate`: published runs predicted from their inputs, and how far off the predictions are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.commands import options
from perfmodel.commands.output import Progress, print_json, print_table
from perfmodel.errors import bad_field

if TYPE_CHECKING:
    from perfmodel.report.validate import ErrorSummary, ValidationResult


def validate(
    cases: Annotated[Path, typer.Argument(metavar="CASES.jsonl", help="Published runs, one JSON object a line.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.csv", help="One row for every case, seconds and bytes.")] = None,
    calibration: options.Calibration = None,
    json: options.Json = False,
) -> None:
    """Predict published runs from their inputs alone; errors by source, and the fit / no-fit record."""
    from perfmodel.api import validate_cases

    if out is not None and not out.absolute().parent.is_dir():
        raise bad_field("out", out, "its folder does not exist", "make it or choose another path")
    total = _count_lines(cases)
    with Progress("validate") as progress:
        result = validate_cases(
            cases, out=out, calibration=calibration, progress=lambda done: progress.share(min(done / max(total, 1), 1.0))
        )
    if json:
        print_json(_object(result))
        return
    _show(result)
    if out is not None:
        print(f"\ntable: {out}")


def _count_lines(path: Path) -> int:
    try:
        with open(path, "rb") as stream:
            return sum(1 for _ in stream)
    except OSError:
        return 0  # the reader says what is wrong with it


def _object(result: ValidationResult) -> dict[str, object]:
    return {
        "num_rows": result.num_rows,
        "num_predicted": result.num_predicted,
        "overall": result.overall,
        "sources": result.sources,
        "fits": result.fits,
        "reasons": result.reasons,
    }


def _show(result: ValidationResult) -> None:
    headers = ("source", "cases", "predicted", "times", "mean", "median", "p90", "bias", "memories", "mem. median", "mem. bias")
    print(f"{result.num_predicted:,} of {result.num_rows:,} cases predicted.")
    print("Errors are |predicted / measured - 1| of the step time and of the memory; bias is their median with its sign.")
    print()
    rows = [_row(each) for each in (*result.sources, result.overall)]
    print_table(headers, rows, right=headers[1:])
    fits = result.fits
    if any((fits.ran_and_fits, fits.ran_but_predicted_out, fits.out_and_predicted_out, fits.out_but_predicted_fits)):
        print()
        print_table(
            ("memory", "predicted to fit", "predicted not to fit"),
            [
                ("ran", f"{fits.ran_and_fits:,}", f"{fits.ran_but_predicted_out:,}"),
                ("out of memory", f"{fits.out_but_predicted_fits:,}", f"{fits.out_and_predicted_out:,}"),
            ],
            title="Does it fit?",
            right=("predicted to fit", "predicted not to fit"),
        )
    if result.reasons:
        print()
        print_table(
            ("cases", "reason"),
            [(f"{count:,}", reason) for reason, count in result.reasons.items()],
            title="Not predicted",
            right=("cases",),
            fold=("reason",),
        )


def _row(each: ErrorSummary) -> tuple[str, ...]:
    errors = (each.mean, each.median, each.p90, each.bias)
    return (
        each.name,
        f"{each.num_rows:,}",
        f"{each.num_predicted:,}",
        f"{each.num_times:,}",
        *map(_share, errors),
        f"{each.num_memories:,}",
        _share(each.memory_median),
        _share(each.memory_bias),
    )


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.1%}" if value < 0 else f"{value:.1%}"
