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
    from perfmodel.report.validate import ErrorSummary, FitCounts, MemorySummary, ValidationResult


def validate(
    cases: Annotated[list[Path], typer.Argument(metavar="CASES.jsonl...", help="Published runs, one JSON object a line.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.csv", help="One row for every case, seconds and bytes.")] = None,
    calibration: options.Calibration = None,
    json: options.Json = False,
) -> None:
    """Predict published runs from their inputs alone; errors of time and memory by source, and the fit / no-fit record."""
    from perfmodel.api import validate_cases

    if out is not None and not out.absolute().parent.is_dir():
        raise bad_field("out", out, "its folder does not exist", "make it or choose another path")
    total = sum(map(_count_lines, cases))
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
        "memories": result.memories,
        "fits": result.fits,
        "framework_fits": result.framework_fits,
        "reasons": result.reasons,
    }


def _show(result: ValidationResult) -> None:
    headers: tuple[str, ...] = ("source", "cases", "predicted", "times", "mean", "median", "p90", "bias")
    print(f"{result.num_predicted:,} of {result.num_rows:,} cases predicted.")
    print("Errors are |predicted / measured - 1|; bias is their median with its sign.")
    print()
    print_table(headers, [_row(each) for each in (*result.sources, result.overall)], title="Step time", right=headers[1:])
    if result.memories:
        headers = ("source", "framework", "counts", "of rank", "cases", "mean", "median", "p90", "bias")
        print()
        print_table(headers, [_memory_row(each) for each in result.memories], title="Peak memory", right=headers[4:])
    if result.fits.num_ran or result.fits.num_out:
        frameworks = result.framework_fits if len(result.framework_fits) > 1 else ()
        headers = ("framework", "right", "ran", "of them predicted not to fit", "ran out", "of them predicted to fit")
        print()
        print_table(headers, [_fit_row(each) for each in (*frameworks, result.fits)], title="Does it fit?", right=headers[1:])
        print("Of runs that state their recomputation.")
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
    return (each.name, f"{each.num_rows:,}", f"{each.num_predicted:,}", f"{each.num_times:,}", *map(_share, errors))


def _memory_row(each: MemorySummary) -> tuple[str, ...]:
    errors = (each.mean, each.median, each.p90, each.bias)
    return (each.name, each.framework, each.kind, each.rank, f"{each.num_rows:,}", *map(_share, errors))


def _fit_row(each: FitCounts) -> tuple[str, ...]:
    return (
        each.name,
        _share(each.accuracy),
        f"{each.num_ran:,}",
        _count(each.ran_but_predicted_out, each.false_out_fraction),
        f"{each.num_out:,}",
        _count(each.out_but_predicted_fits, each.false_fit_fraction),
    )


def _count(count: int, share: float) -> str:
    return f"{count:,}" if math.isnan(share) else f"{count:,} ({share:.1%})"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.1%}" if value < 0 else f"{value:.1%}"
