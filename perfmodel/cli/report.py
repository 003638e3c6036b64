"""`perfmodel report`: a plan, or several side by side, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command, flag
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.request import Request
from perfmodel.report.document import Document


@command(assumed=options.STARTED, output=options.PLAIN_OUTPUT)
def report(
    plans: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN|CONFIG|SEARCH.json...",
            help="A plan, a framework's config or launch script, or what `search --json` printed; several plans: side by side.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="Where the page goes.")] = Path("report.html"),
    assumed: Request,
    output: Output,
) -> None:
    """Write a prediction as one HTML page: time, memory, schedule, other plans, uncertainty and sources."""
    from perfmodel.report.page import report_blocks, report_object
    from perfmodel.verbs.configs import is_config, overridden_plan, start_from
    from perfmodel.verbs.reporting import write_report

    if any(path.endswith(".json") and not is_config(path) for path in plans):
        if len(plans) > 1:
            raise InputError("plans: a search is a page by itself; give its file alone")
        page = write_report(plans[0], out=out)
    else:
        shown: list[str | Plan] = []
        for path in plans:
            start = start_from(path, assumed, spelled=flag)
            plan = overridden_plan(start.plan, assumed, spelled=flag)
            shown.append(path if plan == start.plan and start.setup is None else plan)
        page = write_report(shown, out=out)
    show(Document(content=lambda: report_object(page, str(out)), blocks=lambda: report_blocks(page, str(out))), output)
