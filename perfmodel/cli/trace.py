"""`perfmodel trace`: the predicted step as a Chrome trace, and measured traces next to the prediction."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import command, flag
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.request import Request
from perfmodel.report.document import Document


@command(assumed=options.STARTED, output=options.PLAIN_OUTPUT)
def trace(
    plan: Annotated[str, typer.Argument(metavar="PLAN|CONFIG", help="A plan file or name, or a framework's config or launch script.")] = "",
    *,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            "--measured", metavar="FILE", help="A trace of torch.profiler or a memory snapshot of torch; several: of several ranks."
        ),
    ] = None,
    named: Annotated[str, typer.Option("--plan", metavar="PLAN", help="The same as the argument PLAN.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where the trace goes: FILE.json or FILE.json.gz (default trace.json.gz); else a folder, one file a rank. With "
            "--measured: FILE.jsonl, the measured step or peak of memory as a run for `perfmodel fit`.",
        ),
    ] = None,
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="LIST", help="Ranks to draw, such as 0,8; one for each pipeline stage if left out.")
    ] = "",
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", help="Number of steps of a measured trace that does not mark them (ProfilerStep#N)."),
    ] = None,
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

    The spans of a rank add up to the parts of the prediction. With --measured: compare traces of torch.profiler with the prediction of
    their plan, by part, or memory snapshots of torch with its memory.
    """
    from perfmodel.fitting.memory_snapshot import is_snapshot
    from perfmodel.report import trace as report
    from perfmodel.verbs.configs import overridden_plan, start_from
    from perfmodel.verbs.tracing import compare_memory, compare_trace, trace_paths, trace_plan

    try:
        numbers = [int(number) for number in ranks.split(",")] if ranks else []
    except ValueError:
        raise InputError(f"--ranks {ranks}: must be numbers of ranks; write --ranks 0,8") from None
    if plan and named:
        raise InputError("--plan: is the plan that the argument names already; give one of them")
    start = start_from(plan or named, assumed, spelled=flag) if plan or named else None
    resolved = None if start is None else overridden_plan(start.plan, assumed, spelled=flag)
    read = [] if start is None else start.notes()
    if measured:
        if ranks or detail:
            raise InputError(f"--{'ranks' if ranks else 'detail'}: is for a predicted trace; leave it out with --measured")
        snapshots = [file for file in measured if is_snapshot(file)]
        if snapshots and len(snapshots) < len(measured):
            raise InputError(f"--measured {snapshots[0]}: is a memory snapshot among traces; give traces and snapshots in two calls")
        if snapshots and steps is not None:
            raise InputError("--steps: is for traces; leave it out with memory snapshots")
        if out is not None:
            read.append(f"{out}: the measured {'peak' if snapshots else 'step'} as a run; `perfmodel fit {out}` fits a profile to it")
        if snapshots:
            peaks = compare_memory(snapshots, resolved, out=out)
            document = Document(content=lambda: report.memory_object(peaks), blocks=lambda: report.memory_blocks(peaks, resolved, read))
        else:
            comparison = compare_trace(measured, resolved, out=out, steps=steps)
            blocks = partial(report.comparison_blocks, comparison, resolved, read)
            document = Document(content=lambda: report.comparison_object(comparison), blocks=blocks)
        show(document, output)
        return
    if steps is not None:
        raise InputError("--steps: is for a measured trace; give it with --measured")
    if resolved is None:
        raise InputError("plan: is missing; give a plan to draw, or --measured FILE for a trace of torch.profiler")
    out = out or Path("trace.json.gz")
    timelines = trace_plan(resolved, out=out, ranks=numbers, detail=detail or None)
    files = [str(path) for path in trace_paths(out, [timeline.rank for timeline in timelines])]
    blocks = partial(report.timelines_blocks, timelines, resolved, files, read)
    show(Document(content=lambda: report.timelines_object(timelines, files), blocks=blocks), output)
