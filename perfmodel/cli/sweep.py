"""`perfmodel sweep`: a study's points as one table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.exit_codes import EXIT_INTERRUPTED, EXIT_NOTHING_FITS
from perfmodel.cli.output import Form, Output, Progress, print_error, show
from perfmodel.cli.words import argument, command, option
from perfmodel.foundation.error_objects import ErrorCode
from perfmodel.foundation.errors import one_line
from perfmodel.foundation.files import read_yaml
from perfmodel.foundation.plain import picked
from perfmodel.foundation.units import format_bytes, format_time
from perfmodel.report.document import Block, Command, Document, Facts, Notes, Text
from perfmodel.report.table import Table

if TYPE_CHECKING:
    from perfmodel.verbs.sweep import SweepResult

_SHOWN_ROWS, _SHOWN_REASONS = 10, 3


@command(output=options.OUTPUT)
def sweep(
    study: Annotated[str, argument("STUDY.yaml|NAME", "A study file (`perfmodel schema study`), or a shipped one.")],
    *,
    out: Annotated[Path, option("FILE", "Where the table goes: .parquet or .csv.")] = Path("results.parquet"),
    jobs: Annotated[str | None, option("N", "Processes; one for each core if left out.")] = None,
    scheduler: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="local, dask, or dask:ADDRESS with the address of a scheduler.")
    ] = "local",
    output: Output,
) -> int:
    """Compute a verb over every combination of the values of a study file: models, clusters, chips, batches, knobs, settings.

    Computed points are kept in FILE.parts: after an interruption, or a change of the study, the same command computes the rest. A point
    that cannot be computed is a row with its reason. Exit code 2 where that is every point.
    """
    from perfmodel.foundation.values import read_integer
    from perfmodel.verbs.sweep import run_sweep

    try:
        with Progress("sweep") as progress:
            result = run_sweep(
                study, out=out, jobs=None if jobs is None else read_integer(jobs, "jobs"), engine=scheduler, progress=progress.step
            )
    except KeyboardInterrupt:
        if output.is_text:
            print(f"computed points are kept in {out}.parts; the same command computes the rest", file=sys.stderr)
        return EXIT_INTERRUPTED
    content = {
        **picked(result.study, "verb varied num_points"),
        "num_computed": result.num_computed,
        "num_failed": len(result.failures),
        "reasons": [{"reason": reason, "num_points": times} for reason, times in Counter(result.failures).most_common()],
        "work_time": result.work_time,
        "num_rows": len(result.rows),
        "out": out,
    }
    show(Document(content=lambda: content, blocks=lambda: _blocks(result, out), rows=lambda: result.rows), output)
    if len(result.failures) < result.study.num_points:
        return 0
    print_error(f"no point has a result: {_reasons(result)[0]}", code=ErrorCode.BAD_INPUT, as_json=output.form is Form.JSON)
    return EXIT_NOTHING_FITS


def _reasons(result: SweepResult) -> list[str]:
    """Return the most frequent reasons of failure, with their number of points."""
    frequent = Counter(result.failures).most_common(_SHOWN_REASONS)
    return [f"{times:,} points: {reason}" if times > 1 else reason for reason, times in frequent]


def _blocks(result: SweepResult, out: Path) -> Iterator[Block]:
    from perfmodel.verbs.study import column_of

    study, kept = result.study, result.study.num_points - result.num_computed
    axes = [f"{name} {len(values)}" for group in (*study.zip, study.axes) for name, values in group.items()]
    facts = [
        ("axes", ", ".join(axes) or "none"),
        ("computed", f"{result.num_computed:,} now, {kept:,} kept from before"),
        ("took", f"{format_time(result.work_time)}, all points and processes together"),
        ("table", f"{out} ({len(result.rows):,} rows)"),
    ]
    yield Facts(f"{study.num_points:,} points of {study.verb}, {len(result.failures):,} without a result", facts)
    rows, varied = result.rows[:_SHOWN_ROWS], [column_of(result.study.verb, name) for name in result.study.varied]
    knobs = [name for name in _COLUMNS["knobs"] if any(row.get(name) not in (None, "", 0, 1, "none") for row in rows)]
    results = [name for name in _COLUMNS["results"] if any(row.get(name) not in (None, "") for row in rows)]
    columns = {name: _COLUMNS["results"].get(name, (name, "text")) for name in (*varied, *knobs, *results)}
    cells = (
        ("" if row.get(name) in (None, "") else (_FORMATS.get(form) or form.format)(row[name]) for name, (_, form) in columns.items())
        for row in rows
    )
    yield Table(
        title=f"The first {len(rows)} rows of {len(result.rows):,}" if len(rows) < len(result.rows) else f"{len(rows)} rows",
        headers=tuple(header for header, _ in columns.values()),
        rows=tuple(map(tuple, cells)),
        right=tuple(header for name, (header, _) in columns.items() if any(isinstance(row.get(name), (int, float)) for row in rows)),
        fold=("reason",),
        optional=tuple(name for name in knobs if name not in varied),
    )
    more = len(set(result.failures)) - _SHOWN_REASONS
    yield Notes([*_reasons(result), *([f"{more:,} more reasons in the column reason"] if more > 0 else [])])
    read = "read_parquet" if out.suffix.lower() == ".parquet" else "read_csv"
    yield Text("Read it with", apart=True)
    yield Command(f"python -c \"import pandas; print(pandas.{read}('{out}'))\"")


#: Columns of the printed table in addition to the axes: non-default knobs, and results -> header and format.
_COLUMNS = read_yaml(Path(__file__).with_name("sweep.yaml"))
_FORMATS: Mapping[str, Callable[[Any], str]] = {"text": one_line, "time": format_time, "bytes": format_bytes}
