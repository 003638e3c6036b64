"""`perfmodel trace`: the predicted step as a Chrome trace, and measured traces next to the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command, flag
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.resources import check_can_be_written
from perfmodel.parallel.request import Request
from perfmodel.report.document import Document


@command(assumed=options.STARTED, output=options.PLAIN_OUTPUT)
def trace(
    plan: Annotated[str, typer.Argument(metavar="PLAN|CONFIG", help="A plan file or name, or a framework's config or launch script.")],
    *,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="Where the trace goes: FILE.json or FILE.json.gz; else a folder, one file a rank."),
    ] = Path("trace.json.gz"),
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="LIST", help="Ranks to draw, such as 0,8; one for each pipeline stage if left out.")
    ] = "",
    detail: Annotated[
        str,
        typer.Option(
            "--detail", metavar="NAME", help="A span for each of: operators, layers, passes; the finest that is small if left out."
        ),
    ] = "",
    assumed: Request,
    output: Output,
) -> None:
    """Write the predicted step of some ranks as a Chrome trace, for Perfetto and Holistic Trace Analysis.

    The spans of a rank add up to the parts of the prediction.
    """
    from perfmodel.report.trace import timelines_blocks, timelines_object
    from perfmodel.verbs.configs import overridden_plan, start_from
    from perfmodel.verbs.tracing import checked_ranks, trace_paths, trace_plan

    try:
        numbers = [int(each) for each in ranks.split(",")] if ranks else []
    except ValueError:
        raise InputError(f"--ranks {ranks}: must be numbers of ranks; write --ranks 0,8") from None
    start = start_from(plan, assumed, spelled=flag)
    found = overridden_plan(start.plan, assumed, spelled=flag)
    chosen = checked_ranks(found, numbers)
    for path in trace_paths(out, chosen):
        check_can_be_written(path if path.parent.exists() else path.parent, "out")
    timelines = trace_plan(found, out=out, ranks=chosen, detail=detail or None)
    files = [str(path) for path in trace_paths(out, chosen)]
    document = Document(
        content=lambda: timelines_object(timelines, files), blocks=lambda: timelines_blocks(timelines, found, files, start.notes())
    )
    show(document, output)
