"""`perfmodel search --by --budget`: clusters and chip counts that train by a deadline or within a budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from perfmodel.cli import options
from perfmodel.cli.output import Form, Output, Progress, first_interrupt, print_error
from perfmodel.cli.words import flag
from perfmodel.foundation.error_objects import ErrorCode
from perfmodel.foundation.errors import InputError
from perfmodel.report.document import Block, Document, Notes, Text

if TYPE_CHECKING:
    from perfmodel.cli.search import Ranking
    from perfmodel.parallel.knobs import Knobs
    from perfmodel.parallel.request import Request
    from perfmodel.planner.sizing import Sizing
    from perfmodel.verbs.configs import Start
    from perfmodel.verbs.training import AskedRun


def size(
    wanted: Ranking,
    asked: Request,
    knobs: Knobs,
    maximum: Mapping[str, int],
    *,
    run: AskedRun | None,
    ties: float,
    any_framework: bool,
    start: Start | None,
    files: options.Files,
    output: Output,
) -> tuple[Sizing, bool]:
    """Print the Pareto front and write the files. Return the result, and whether a run meets deadline and budget."""
    from perfmodel.report.sizing import sizing_facts, sizing_figure, sizing_object, sizing_table
    from perfmodel.verbs.sizing import read_budget, read_deadline, size_asked

    if run is None:
        name = "by" if wanted.by is not None else "budget"
        raise InputError(f"{flag(name)}: sizes a cluster for a whole run; give its tokens, as --tokens 15T")
    deadline, budget = read_deadline(wanted.by), read_budget(wanted.budget)
    with Progress("size") as progress, first_interrupt() as was_interrupted:

        def report(done: float) -> bool:
            progress.share(done)
            return was_interrupted()

        sizing = size_asked(
            asked, knobs, maximum, run=run, deadline=deadline, budget=budget, ties=ties, any_framework=any_framework,
            plan=start.plan if start is not None else None, spelled=flag, progress=report,
        )  # fmt: skip
    if sizing.best is None:
        files = replace(files, save=None, report=None)
    else:
        files.save_plan(sizing.best.prediction.plan)
        files.write_page([sizing.best.prediction.plan])
    files.draw(lambda _: sizing_figure(sizing))

    def blocks() -> Iterator[Block]:
        yield sizing_facts(sizing)
        yield sizing_table(sizing)
        yield from (Text(f"not searched: {failure}", apart=index == 0) for index, failure in enumerate(sizing.not_sized))
        yield Notes(start.notes(verbose=output.verbose) if start is not None else [])

    document = Document(
        content=lambda: sizing_object(sizing) | (start.object() if start is not None else {}),
        blocks=blocks,
        rows=sizing.rows,
    )
    files.finish(document, output)
    if sizing.best is None and not sizing.interrupted:
        sys.stdout.flush()
        print_error(sizing.reason, code=ErrorCode.NOTHING_MEETS, as_json=output.form is Form.JSON)
    return sizing, sizing.best is not None
