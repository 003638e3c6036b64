"""`perfmodel predict`: step time and memory of one plan, or of several combinations of job, cluster and knobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import options
from perfmodel.cli.output import Form, Output, Progress
from perfmodel.cli.words import argument, command, flag, option
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.words import Words
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request
from perfmodel.report.document import Block, Document, Facts, Notes, Text

if TYPE_CHECKING:
    from perfmodel.cost.training_run import TrainingRun
    from perfmodel.parallel.prediction import NotPredicted, Prediction
    from perfmodel.planner.result import FittingChange
    from perfmodel.verbs.confidence import Confidence
    from perfmodel.verbs.requests import Answer


@command(
    asked=Words(Request, several=True),
    chip=Words(options.ChipWords, several=True),
    knobs=Words(Knobs, varied=True),
    run=options.WholeRun,
    files=options.Files,
    output=options.OUTPUT,
)
def predict(
    plan: Annotated[
        str, argument("PLAN|CONFIG", "A plan file or name, or a framework's config or launch script; flags override its values.")
    ] = "",
    *,
    asked: Request,
    chip: options.ChipWords,
    knobs: tuple[Knobs, ...],
    interval: Annotated[
        bool,
        typer.Option("--interval", help="Print the 80 % prediction interval of the step time, and its most sensitive parameters."),
    ] = False,
    run: options.WholeRun,
    network: Annotated[str, option("MODULE:FACTORY", "For a plan of `shard`: the module to load.")] = "",
    output: Output,
    files: options.Files,
) -> None:
    """Predict step time, memory and utilization of a plan, or of every combination of several values.

    A degree that is left out is 1; the rest of the chips go to dp_replicate (with --zero 1, 2 or 3: to dp_shard). Flags marked [*] take
    several values, as --seq-len 4k,8k or again and again. A plan that does not fit is predicted all the same.
    """
    from perfmodel.parallel.rows import table_rows
    from perfmodel.verbs.configs import start_from
    from perfmodel.verbs.objects import one_object, remedies_of, shown_intervals
    from perfmodel.verbs.requests import make_requests, predict_requests, varied_knobs
    from perfmodel.verbs.training import run_in

    output = files.check(output)
    asked = replace(asked, cluster=options.with_chip(asked.cluster, chip))
    asked_run = run.read()
    num_tokens = asked_run.tokens if asked_run else 0.0
    start = start_from(plan, asked, spelled=flag) if plan else None
    given_plan = start.plan if start is not None else None
    if given_plan is not None and given_plan.assignment is not None:
        from perfmodel.cli.network_plan import predict_network_file

        if files.report is not None:
            raise InputError("--report: has no page for a plan of `perfmodel shard`; leave it out")
        others = {
            "tokens": run.tokens,
            "assume": run.assume,
            "plot": files.plot,
            "save": files.save,
            "csv": files.csv,
            "interval": interval or None,
        }
        predict_network_file(given_plan, asked, network=network, output=output, **others, **knobs[0].given())
        return
    if network:
        raise InputError("--network: is for plans of `perfmodel shard`; leave it out")
    requests = make_requests(asked, of_plan=bool(plan), spelled=flag)
    is_one = len(requests) * len(knobs) == 1
    if files.save is not None and not is_one:
        raise InputError("--save: can write one plan only; give one value of everything")
    answers, failures = predict_requests(requests, knobs, plan=given_plan)
    predictions = [answer.prediction for answer in answers]
    files.save_plan(predictions[0].plan)
    files.write_page([prediction.plan for prediction in predictions])
    files.draw(lambda figures: figures.predictions_figure(predictions))
    confidences = shown_intervals(answers, interval=interval)
    runs = [run_in(answer.setting, answer.prediction, asked_run) for answer in answers] if asked_run else []
    if is_one:
        remedies: tuple[FittingChange, ...] = ()
        if not predictions[0].fits and output.form is not Form.CSV:
            with Progress("looking for what would fit") as progress:
                progress.share(0.0)
                remedies = remedies_of(answers[0], requests[0])
        content = partial(one_object, answers[0], runs=runs, tokens=num_tokens, confidences=confidences, remedies=remedies)
        blocks = partial(_one_blocks, answers[0], runs=runs, confidences=confidences, remedies=remedies, output=output)
    else:
        content = partial(_several_object, predictions, failures, runs=runs, tokens=num_tokens, confidences=confidences)
        varied = varied_knobs(knobs)
        blocks = partial(_several_blocks, predictions, failures, tokens=num_tokens, confidences=confidences, varied=varied)
    intervals = [bounds for bounds, _ in confidences]
    read = start.notes(verbose=output.verbose) if start is not None else []
    document = Document(
        content=lambda: content() | (start.object() if start is not None else {}),
        blocks=lambda: chain(blocks(), [Notes(read)] if read else ()),
        rows=lambda: table_rows(predictions, failures, tokens=num_tokens, intervals=intervals),
    )
    files.finish(document, output)


def _one_blocks(
    answer: Answer,
    *,
    runs: Sequence[TrainingRun],
    confidences: Sequence[Confidence],
    remedies: tuple[FittingChange, ...],
    output: Output,
) -> Iterator[Block]:
    from perfmodel.parallel.prediction import notes
    from perfmodel.report.advice import fitting_blocks
    from perfmodel.report.predictions import confidence_lines, headline, memory_table, parts_table, sensitivity_table, verdict_line
    from perfmodel.report.training_run import run_facts
    from perfmodel.verbs.exporting import runs_in

    prediction = answer.prediction
    lines = [line for interval, _ in confidences for line in confidence_lines(prediction, interval)]
    # the values of the plan file that flags override, and the values that change with them
    given, following = (
        ", ".join(
            f"{change.knob} {_text(change.after)} (the file: {_text(change.before)})"
            for change in answer.changes
            if change.follows is follows
        )
        for follows in (False, True)
    )
    overrides = [given] if given else []
    overrides += [f"so that also {following}"] if following else []
    changed = [("" if number else "overrides", text) for number, text in enumerate(overrides)]
    facts = headline(prediction, verbose=output.verbose, runs_in=runs_in(answer.setting, prediction.plan))
    yield Facts(verdict_line(prediction), changed + facts + lines)
    yield from map(run_facts, runs)
    yield parts_table(prediction)
    yield memory_table(prediction)
    yield from (sensitivity_table(named) for _, named in confidences if named)
    if not prediction.fits:
        yield from fitting_blocks(prediction.plan, remedies)
    yield Notes(notes(prediction))


def _text(value: object) -> str:
    if value == "":
        return "none"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)


def _several_object(
    predictions: Sequence[Prediction],
    failures: Sequence[NotPredicted],
    *,
    runs: Sequence[TrainingRun],
    tokens: float,
    confidences: Sequence[Confidence],
) -> dict[str, Any]:
    from perfmodel.report.predictions import confidence_object, prediction_object

    objects = [prediction_object(prediction, tokens=tokens) for prediction in predictions]
    for content, run in zip(objects, runs, strict=bool(runs)):
        content["run"] = run.to_dict()
    for content, prediction, (interval, named) in zip(objects, predictions, confidences, strict=bool(confidences)):
        content |= confidence_object(prediction, interval, named)
    return {"predictions": objects, "not_predicted": [{**failure.asked, "reason": failure.reason} for failure in failures]}


def _several_blocks(
    predictions: Sequence[Prediction],
    failures: Sequence[NotPredicted],
    *,
    tokens: float,
    confidences: Sequence[Confidence],
    varied: Sequence[str],
) -> Iterator[Block]:
    from perfmodel.report.predictions import convention_lines, settings_table, settings_title

    yield Text(settings_title(predictions))
    yield settings_table(predictions, tokens=tokens, intervals=[interval for interval, _ in confidences], varied=varied)
    yield Notes(convention_lines(predictions))
    yield from (Text(f"not predicted: {failure}") for failure in failures)
