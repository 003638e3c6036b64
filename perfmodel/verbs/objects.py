"""Results of `predict` and `search` as JSON objects, for the command line and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfmodel.cost.training_run import TrainingRun
from perfmodel.parallel.prediction import NotPredicted
from perfmodel.parallel.request import Request
from perfmodel.planner.result import FittingChange, TrainingSearch
from perfmodel.report.advice import remedies_objects
from perfmodel.report.predictions import confidence_object, prediction_object
from perfmodel.verbs.confidence import Confidence, confidence_in, interval_in, need_intervals
from perfmodel.verbs.exporting import runs_in
from perfmodel.verbs.requests import Answer
from perfmodel.verbs.setting import Setting
from perfmodel.verbs.training import AskedRun, run_in
from perfmodel.workload.config import TransformerConfig


def shown_intervals(answers: Sequence[Answer], *, interval: bool) -> list[Confidence]:
    """Return the interval of every answer if it is requested, or if the kernels of a chip were not measured."""
    if interval:
        return [confidence_in(answer.setting, answer.prediction.plan) for answer in answers]
    settings = [answer.setting for answer in answers if isinstance(answer.prediction.plan.job.model, TransformerConfig)]
    if len(settings) < len(answers) or not need_intervals(settings):
        return []
    return [(interval_in(answer.setting, answer.prediction.plan), ()) for answer in answers]


def remedies_of(answer: Answer, request: Request) -> tuple[FittingChange, ...]:
    """Return the smallest changes with which a plan that does not fit would fit; empty for a network."""
    from perfmodel.verbs.searching import remedies_in

    plan = answer.prediction.plan
    if answer.prediction.fits or not isinstance(plan.job.model, TransformerConfig) or plan.job.routing.counts is not None:
        return ()
    return remedies_in(answer.setting, plan, memory_headroom=request.memory_headroom, risk=request.risk)


def one_object(
    answer: Answer, *, runs: Sequence[TrainingRun], tokens: float, confidences: Sequence[Confidence], remedies: tuple[FittingChange, ...]
) -> dict[str, Any]:
    """Return the object of one prediction. runs: the training run, none or one; confidences: its interval, none or one."""
    prediction, content = answer.prediction, prediction_object(answer.prediction, tokens=tokens)
    content["runs_in"] = runs_in(answer.setting, prediction.plan)
    for run in runs:
        content["run"] = run.to_dict()
    for interval, named in confidences:
        content |= confidence_object(prediction, interval, named)
    if answer.changes:
        content["overridden"] = {
            change.knob: {"plan": change.before, "now": change.after, "follows": change.follows} for change in answer.changes
        }
    if not prediction.fits:
        content["remedies"] = remedies_objects(remedies)
    return content


def searches_object(
    results: list[tuple[Setting, TrainingSearch]], failures: list[NotPredicted], *, run: AskedRun | None, interval: bool
) -> dict[str, Any]:
    """Return the object of one search, or of several settings. failures: combinations that could not be searched."""
    from perfmodel.report.searches import search_object

    objects = [search_object(result, tokens=run.tokens if run else 0.0) for _, result in results]
    for search_content, (setting, result) in zip(objects, results, strict=True):
        search_content |= setting.described()
        if run is not None and result.plans:
            search_content["run"] = run_in(setting, result.plans[0], run).to_dict()
        shows_interval = interval or need_intervals([setting])
        for plan_content, prediction in zip(search_content["plans"], result.plans, strict=True):
            plan_content["runs_in"] = runs_in(setting, prediction.plan)
            if shows_interval:
                plan_content |= confidence_object(prediction, interval_in(setting, prediction.plan), ())
    not_searched = [{**failure.asked, "reason": failure.reason} for failure in failures]
    return {"searches": objects, "not_searched": not_searched} if len(results) + len(failures) > 1 else objects[0]
