"""`perfmodel export | advise`: a plan as configuration files of a framework, and advised changes to a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, Progress, show
from perfmodel.cli.words import command, flag
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.words import words_of
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Document, Facts, Notes, Text

if TYPE_CHECKING:
    from perfmodel.report.advice import Advice


@command(assumed=options.STARTED, output=options.PLAIN_OUTPUT)
def export(
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|CONFIG|JSON",
            help="A plan file or name, a framework's config or launch script; "
            "of serving what `serve --json` or `serve --search --json` wrote.",
        ),
    ],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FRAMEWORK",
            help="torchtitan (0.2), torchtitan-python (0.3), megatron, megatron-bridge, nemo-automodel, trl, llama-factory, axolotl, "
            "ms-swift, swift-megatron, deepspeed, nanotron or maxtext; of serving vllm, sglang, tensorrt-llm, llm-d, dynamo or kserve.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write launch file and config, named as FILE; print them if left out."),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            "--launcher",
            metavar="NAME",
            help="torchrun; slurm for a batch script, skypilot for a task, kubernetes for a TrainJob of Kubeflow with the config in it.",
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
    from perfmodel.verbs.exporting import export_plan, write_export
    from perfmodel.verbs.serving_export import export_service, is_service

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
    plan: Annotated[str, typer.Argument(metavar="PLAN|CONFIG", help="A plan file or name, or a framework's config or launch script.")],
    *,
    assumed: Request,
    chip: options.ChipWords,
    any_framework: options.AnyFramework = False,
    output: Output,
) -> None:
    """Predict the current setup, and advise what to change: the most helpful changes, the best plan, and both in the framework's options.

    Where the setup does not fit: the smallest changes that do.
    """
    from dataclasses import replace

    from perfmodel.report.advice import advice_object
    from perfmodel.verbs.advice import advise_on
    from perfmodel.verbs.configs import start_from

    clusters = options.with_chip([assumed.cluster] if assumed.cluster else [], chip)
    assumed = replace(assumed, cluster=options.single_value(clusters, "cluster"))
    start = start_from(plan, assumed, spelled=flag)
    with Progress("advise") as progress:
        advice = advise_on(start, assumed, any_framework=any_framework, spelled=flag, progress=progress.share)
    read = start.notes(verbose=output.verbose)
    show(Document(content=lambda: advice_object(advice) | start.object(), blocks=lambda: _advice_blocks(advice, read)), output)


def _advice_blocks(advice: Advice, read: list[str]) -> Iterator[Block]:
    from perfmodel.parallel.prediction import notes
    from perfmodel.report.advice import changes_table, diff_lines, fitting_changes_table, gain_line, nothing_helps, why_slow
    from perfmodel.report.predictions import job_line, memory_line, plan_line, verdict_line

    current = advice.prediction
    facts = [("job", job_line(current.plan)), ("plan", plan_line(current.plan)), ("memory", memory_line(current))]
    yield Facts(verdict_line(current), facts)
    yield Text(why_slow(current), apart=True)
    if not current.fits:
        if advice.remedies:
            yield fitting_changes_table(advice.remedies)
        else:
            yield Text(nothing_helps(current.plan), apart=True)
    if advice.changes:
        yield changes_table(advice)
    yield Text(gain_line(advice), apart=True)
    if advice.diff:
        yield Text(f"Options of {advice.framework} to change", apart=True)
        yield from map(Text, diff_lines(advice))
    yield Notes(list(dict.fromkeys([*advice.notes, *read, *notes(current)])))
