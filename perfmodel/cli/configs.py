"""`perfmodel advise | export | trace | report`: what follows from a plan or a configuration, as advice and as files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import argument, command, flag, option
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.words import words_of
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Document, Notes, Text


@command(assumed=options.STARTED, output=options.PLAIN_OUTPUT)
def export(
    plan: Annotated[
        str,
        argument(
            "PLAN|CONFIG|JSON",
            "A plan file or name, a framework's config or launch script; of serving what `serve --json` or `serve --search --json` wrote.",
        ),
    ],
    *,
    to: Annotated[
        str,
        option(
            "FRAMEWORK",
            "torchtitan (0.2), torchtitan-python (0.3), megatron, megatron-bridge, nemo-automodel, trl, llama-factory, axolotl, "
            "ms-swift, swift-megatron, deepspeed, nanotron or maxtext; of serving vllm, sglang, tensorrt-llm, llm-d, dynamo or kserve.",
        ),
    ],
    out: Annotated[Path | None, option("FILE", "Write launch file and config, named as FILE; print them if left out.")] = None,
    launcher: Annotated[
        str,
        option(
            "NAME", "torchrun; slurm for a batch script, skypilot for a task, kubernetes for a TrainJob of Kubeflow with the config in it."
        ),
    ] = "torchrun",
    assumed: Request,
    output: Output,
) -> None:
    """Write a plan as the configuration and launch file of a framework, with the predicted numbers behind each option.

    What the framework cannot express is refused or noted. The files are read back before they are written: they give the same plan. A
    serving plan is written as launch scripts of its engine, or as a manifest for Kubernetes with the same options.
    """
    from perfmodel.verbs.configs import overridden_plan, start_from
    from perfmodel.verbs.exporting import export_plan, export_service, is_service, write_export

    stem = out.stem if out is not None else "plan"
    notes: list[str] = []
    if is_service(plan):
        given = [name for name in words_of(Request) if getattr(assumed, name) not in (getattr(Request(), name), None, [], {})]
        if given or launcher != "torchrun":
            raise InputError(f"{flag((*given, 'launcher')[0])}: goes with training plans; a serving plan has its own, so leave it out")
        exported = export_service(plan, to=to, stem=stem)
    else:
        start = start_from(plan, assumed, spelled=flag)
        exported = export_plan(overridden_plan(start.plan, assumed, spelled=flag), to=to, stem=stem, launcher=launcher)
        notes = start.notes()
    if out is not None:
        endings = list(dict.fromkeys(Path(name).suffix for name in exported.files))
        if out.suffix and out.suffix not in endings:
            rule = f"{exported.framework} is written as files that end in {', '.join(endings)}"
            raise bad_field("out", out, rule, f"write {out.with_suffix(endings[-1])}")
        if any((out.parent / name).resolve() == Path(plan).resolve() for name in exported.files):
            raise bad_field("out", out, f"would overwrite {plan}", "use another name")
        write_export(exported, out.parent)

    def blocks() -> Iterator[Block]:
        if out is None:
            for name, text in exported.files.items():
                yield Text(f"{name}:", apart=True)
                yield Text(text.rstrip("\n"), wraps=False)
        else:
            yield Text(f"{exported.framework}: {', '.join(str(out.parent / name) for name in exported.files)}")
        yield Notes([*exported.notes, *notes])

    content = {"framework": exported.framework, "files": exported.files, "notes": exported.notes}
    show(Document(content=lambda: content, blocks=blocks), output)


@command(assumed=options.STARTED, chip=options.ChipWords, output=options.OUTPUT)
def advise(
    plan: Annotated[str, argument("PLAN|CONFIG", "A plan file or name, or a framework's config or launch script.")],
    *,
    assumed: Request,
    chip: options.ChipWords,
    any_framework: options.AnyFramework = False,
    output: Output,
) -> None:
    """Predict the current setup, and advise what to change: the most helpful changes, the best plan, and both in the framework's options.

    Where the setup does not fit: the smallest changes that do.
    """
    from perfmodel.report.advice import advice_blocks, advice_object
    from perfmodel.verbs.advice import advise_on
    from perfmodel.verbs.configs import start_from

    clusters = options.with_chip([assumed.cluster] if assumed.cluster else [], chip)
    assumed = replace(assumed, cluster=options.single_value(clusters, "cluster"))
    start = start_from(plan, assumed, spelled=flag)
    with Progress("advise") as progress:
        advice = advise_on(start, assumed, any_framework=any_framework, spelled=flag, progress=progress.share)
    read = start.notes(verbose=output.verbose)
    show(Document(content=lambda: advice_object(advice) | start.object(), blocks=lambda: advice_blocks(advice, read)), output)


@command(assumed=options.STARTED, output=options.PLAIN_OUTPUT)
def trace(
    plan: Annotated[str, argument("PLAN|CONFIG", "A plan file or name, or a framework's config or launch script.")] = "",
    *,
    measured: Annotated[
        list[str] | None, option("FILE", "A trace of torch.profiler or a memory snapshot of torch; several: of several ranks.")
    ] = None,
    named: Annotated[str, typer.Option("--plan", metavar="PLAN", help="The same as the argument PLAN.")] = "",
    out: Annotated[
        Path | None,
        option(
            "FILE",
            "Where the trace goes: FILE.json or FILE.json.gz (default trace.json.gz); else a folder, one file a rank. With "
            "--measured: FILE.jsonl, the measured step or peak of memory as a run for `perfmodel fit`.",
        ),
    ] = None,
    ranks: Annotated[str, option("LIST", "Ranks to draw, such as 0,8; one for each pipeline stage if left out.")] = "",
    steps: Annotated[int | None, option("N", "Number of steps of a measured trace that does not mark them (ProfilerStep#N).")] = None,
    detail: Annotated[str, option("NAME", "A span for each of: operators, layers, passes; the finest that is small if left out.")] = "",
    assumed: Request,
    output: Output,
) -> None:
    """Write the predicted step of some ranks as a Chrome trace, for Perfetto and Holistic Trace Analysis.

    The spans of a rank add up to the parts of the prediction. With --measured: compare traces of torch.profiler with the prediction of
    their plan, by part, or memory snapshots of torch with its memory.
    """
    from perfmodel.fitting.memory_snapshot import is_snapshot
    from perfmodel.report import trace as shown
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
            document = Document(content=lambda: shown.memory_object(peaks), blocks=lambda: shown.memory_blocks(peaks, resolved, read))
        else:
            comparison = compare_trace(measured, resolved, out=out, steps=steps)
            blocks = partial(shown.comparison_blocks, comparison, resolved, read)
            document = Document(content=lambda: shown.comparison_object(comparison), blocks=blocks)
        show(document, output)
        return
    if steps is not None:
        raise InputError("--steps: is for a measured trace; give it with --measured")
    if resolved is None:
        raise InputError("plan: is missing; give a plan to draw, or --measured FILE for a trace of torch.profiler")
    out = out or Path("trace.json.gz")
    timelines = trace_plan(resolved, out=out, ranks=numbers, detail=detail or None)
    files = [str(path) for path in trace_paths(out, [timeline.rank for timeline in timelines])]
    blocks = partial(shown.timelines_blocks, timelines, resolved, files, read)
    show(Document(content=lambda: shown.timelines_object(timelines, files), blocks=blocks), output)


@command(assumed=options.STARTED, output=options.PLAIN_OUTPUT)
def report(
    plans: Annotated[
        list[str],
        argument(
            "PLAN|CONFIG|SEARCH.json...",
            "A plan, a framework's config or launch script, or what `search --json` printed; several plans: side by side.",
        ),
    ],
    *,
    out: Annotated[Path, option("FILE.html", "Where the page goes.")] = Path("report.html"),
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
