"""`perfmodel explain | compare`: why a plan is fast or slow, why not another, and plans side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Output, show
from perfmodel.cli.words import argument, command, flag, option
from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.words import Words, given_words
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Document, Facts, Notes, Text

if TYPE_CHECKING:
    from perfmodel.planner.explain import Explanation


@command(assumed=options.STARTED, output=options.OUTPUT)
def explain(
    plan: Annotated[str, argument("PLAN|CONFIG", "A plan file or name, or a framework's config or launch script.")],
    *,
    why_not: Annotated[list[str], option("KNOB=VALUE[,...]", "Knobs that you would have chosen, such as tp=16,pp=2.")] = [],  # noqa: B006  # typer requires a list; it is never mutated
    trust: Annotated[
        bool, typer.Option("--trust", help="Show the sources of uncertainty of the step time, and the cheapest measurement that halves it.")
    ] = False,
    assumed: Request,
    any_framework: options.AnyFramework = False,
    output: Output,
) -> None:
    """Explain where a plan's time and memory go, what each knob would change, and why not another plan."""
    from perfmodel.planner.explain import parse_knobs
    from perfmodel.report.searches import explanation_object
    from perfmodel.verbs.api import explain_plan
    from perfmodel.verbs.configs import overridden_plan, start_from

    start = start_from(plan, assumed, spelled=flag)
    overridden = overridden_plan(start.plan, assumed, spelled=flag)
    assumptions = {name: value for name, value in given_words(assumed).items() if name in options.ASSUMED.words()}
    asked = [parse_knobs(text) for text in why_not] or [{}]
    explanations = [
        explain_plan(overridden, why_not=knobs or None, trust=trust and knobs is asked[0], any_framework=any_framework, **assumptions)
        for knobs in asked
    ]
    explanation = replace(explanations[0], why_not=tuple(answer for one in explanations for answer in one.why_not))
    read = start.notes(verbose=output.verbose)
    show(
        Document(
            content=lambda: explanation_object(explanation) | start.object(),
            blocks=lambda: chain(_blocks(explanation, output), [Notes(read)] if read else ()),
        ),
        output,
    )


def _blocks(explanation: Explanation, output: Output) -> Iterator[Block]:
    from perfmodel.parallel.prediction import notes
    from perfmodel.report.advice import fitting_changes_table
    from perfmodel.report.predictions import headline, job_line, memory_table, parts_table, plan_line, verdict_line
    from perfmodel.report.searches import neighbours_table

    prediction, trust = explanation.prediction, explanation.trust
    for answer in explanation.why_not:
        yield Text(f"Why not {answer.reason}.")
    if trust is not None:
        from perfmodel.report.trust import remedies_table, trust_lines, uncertainty_table

        yield Facts(job_line(prediction.plan), [("plan", plan_line(prediction.plan)), *trust_lines(trust, prediction.step_time)])
        yield uncertainty_table(trust)
        if trust.remedies:
            yield remedies_table(trust, prediction.step_time)
        return
    yield Facts(verdict_line(prediction), headline(prediction, verbose=output.verbose))
    yield parts_table(prediction)
    yield memory_table(prediction)
    if explanation.neighbours:
        yield neighbours_table(explanation)
    if explanation.remedies:
        yield fitting_changes_table(explanation.remedies)
    yield Notes(notes(prediction))


@command(assumed=options.ASSUMED, output=options.output_options("wide json format"), files=Words(options.Files, only="plot"))
def compare(
    plans: Annotated[list[str], argument("PLAN.yaml PLAN.yaml...", "Plan files, or expert plans by name.")],
    *,
    assumed: Request,
    output: Output,
    files: options.Files,
) -> None:
    """Compare plans side by side: time, its parts, memory, and the knobs that differ; of services latencies, throughput and cost."""
    from perfmodel.parallel.plan_file import is_serving_plan
    from perfmodel.parallel.rows import table_rows
    from perfmodel.report.predictions import comparison_tables, comparison_verdict, is_one_job, prediction_object, short_names
    from perfmodel.verbs.api import compare_plans

    output = files.check(output)
    if len(plans) < 2:
        raise InputError("compare: needs at least two plans; give their files, or use perfmodel predict for one")
    services = [plan for plan in plans if is_serving_plan(plan)]
    if services:
        if len(services) < len(plans):
            raise InputError(f"compare: {one_line(services[0], 200)} is a plan of a service, and others train; compare plans of one kind")
        if any(given_words(assumed).values()) or files.plot is not None:
            raise InputError("compare: plans of services take no options; change them with `perfmodel serve PLAN`")
        _compare_services(services, output)
        return
    predictions = compare_plans(plans, **given_words(assumed))
    names = short_names(plans)
    files.draw(lambda figures: figures.predictions_figure(predictions, names=names))
    same_job = is_one_job(predictions)

    def content() -> dict[str, Any]:
        objects = [{"file": name, **prediction_object(prediction)} for name, prediction in zip(plans, predictions, strict=True)]
        return {"same_job": same_job, "plans": objects}

    def blocks() -> Iterator[Block]:
        yield Text(comparison_verdict(names, predictions))
        yield from comparison_tables(names, predictions)
        if not same_job:
            yield Notes(["these plans run different jobs: compare tokens/s a chip, not step times"])

    def rows() -> Iterator[dict[str, Any]]:
        return ({"file": name, **row} for name, row in zip(plans, table_rows(predictions), strict=True))

    files.finish(Document(content=content, blocks=blocks, rows=rows), output)


def _compare_services(plans: list[str], output: Output) -> None:
    from perfmodel.parallel.rows import serving_row
    from perfmodel.report.predictions import short_names
    from perfmodel.report.serving import predicted_line, services_table, serving_object
    from perfmodel.verbs.serving_predict import serve_plan

    predictions = [serve_plan(plan) for plan in plans]
    rows = [{"file": plan, **serving_row(prediction)} for plan, prediction in zip(plans, predictions, strict=True)]
    varied = [name for name in _OF_SERVICE if len({str(row[name]) for row in rows}) > 1]

    def blocks() -> Iterator[Block]:
        lines = [
            predicted_line({"plan file": name} | {field: row[field] for field in varied}, prediction, {})
            for name, row, prediction in zip(short_names(plans), rows, predictions, strict=True)
        ]
        yield services_table(lines)

    def content() -> dict[str, Any]:
        return {"plans": [{"file": plan, **serving_object(prediction)} for plan, prediction in zip(plans, predictions, strict=True)]}

    show(Document(content=content, blocks=blocks, rows=lambda: rows), output)


#: Fields of which a comparison of services shows those that differ.
_OF_SERVICE = (
    *("model", "cluster", "chips", "engine", "quantization", "kv_precision", "input_len", "output_len", "concurrency", "rate"),
    "prefix_hit",
)
