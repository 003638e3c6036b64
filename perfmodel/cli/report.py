"""`perfmodel report`: a plan, or several side by side, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command
from perfmodel.report.document import Document


@command(output=options.PLAIN_OUTPUT)
def report(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN.yaml...", help="A plan file or name; several: side by side.")],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="Where the page goes.")] = Path("report.html"),
    output: Output,
) -> None:
    """Write a prediction as one HTML page: time, memory, schedule, other plans, uncertainty and sources."""
    from perfmodel.report.page import report_blocks, report_object
    from perfmodel.verbs.reporting import write_report

    page = write_report(plans, out=out)
    show(Document(content=lambda: report_object(page, str(out)), blocks=lambda: report_blocks(page, str(out))), output)
