"""`report`: the prediction of a plan, or a comparison of several, as one HTML page."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from perfmodel.cost.resolve import choose_calibration
from perfmodel.cost.trace import Detail, rank_timelines
from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.files import read_text
from perfmodel.foundation.resources import check_can_be_written, write_atomically
from perfmodel.hardware.cluster_text import short_name
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.plan_file import plan_from_dict, plan_text
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.planner.result import Expectation, MemoryBudget, Objective, SearchResult, ServingSearch, TrainingSearch
from perfmodel.planner.ties import ranking_of
from perfmodel.report.document import Block
from perfmodel.report.page import Report, comparison_report, plan_report, service_report, sources_table
from perfmodel.report.predictions import short_names
from perfmodel.verbs.api import compare_plans, explain_plan, predict_plan
from perfmodel.verbs.serving_predict import operators_of
from perfmodel.verbs.serving_setting import ServingSetting
from perfmodel.verbs.setting import Name, load_plan, setting_of_plan
from perfmodel.verbs.tracing import checked_ranks
from perfmodel.workload.config import TransformerConfig


def write_report(plans: Plan | Name | TrainingSearch | Sequence[Plan | Name], *, out: str | Path) -> Report:
    """Write the prediction of a plan as one HTML page: breakdown of time and memory, schedule, other plans, uncertainty and sources.

    plans   a plan (file), several for a comparison, or the result of `find_plans` or the file of `search --json`: its best plan and the
            other plans in it
    out     file to write: .html
    """
    search, result = str(plans) if isinstance(plans, (str, Path)) and str(plans).endswith(".json") else "", None
    plans = read_search(search) if search else plans
    if isinstance(plans, SearchResult):
        result = plans
        if not plans.plans:
            raise InputError("plans: the search found no plan that fits; allow more chips or a smaller batch")
        plans = plans.plans[0].plan
    given: list[Plan | Name] = [plans] if isinstance(plans, (Plan, str, Path)) else list(plans)
    if not given:
        raise InputError("plans: are missing; give a plan or its file")
    check_can_be_written(out, "out", endings=".html .htm", rule=".html", remedy="write report.html")
    loaded = [load_plan(entry) for entry in given]
    unnamed = "plan.yaml" if len(given) == 1 else "plan{}.yaml"
    names = [unnamed.format(number) if isinstance(entry, Plan) else str(entry) for number, entry in enumerate(given, 1)]
    command = f"perfmodel report {' '.join(map(shlex.quote, [search] if search else names))}"
    texts = list(map(plan_text, loaded))
    if len(loaded) > 1:
        predictions = dict(zip(short_names(names), compare_plans(loaded), strict=True))
        page = comparison_report(predictions, texts=texts, commands=[command])
    else:
        plan = loaded[0]
        explanation = explain_plan(plan, trust=isinstance(plan.job.model, TransformerConfig))
        setting = setting_of_plan(plan)
        timelines = rank_timelines(setting.estimator, plan, checked_ranks(plan, ()), Detail.PASSES)
        profile, cluster = setting.estimator.profile, setting.cluster
        # the calibration of a plan is that of its first kind of chips
        others = [choose_calibration(pool.chip) for pool in cluster.pools[1:]]
        calibrations = [choose_calibration(cluster.chip, setting.calibration), *others]
        peak = (explanation.prediction.peak_flop_rate, explanation.prediction.conditions.peak_dtype)
        sources = sources_table(plan.job.model, cluster, calibrations, peak, ("framework", short_name(profile.name), profile.source))
        commands = [command, f"perfmodel explain {shlex.quote(names[0])} --trust"]
        page = plan_report(explanation, timelines, sources=sources, plan_text=texts[0], commands=commands, result=result)
    write_atomically(out, page.html)
    return page


def write_service_report(
    setting: ServingSetting,
    prediction: ServingPrediction,
    *,
    out: str | Path,
    limits: Mapping[str, float],
    start: Sequence[Block],
    command: str,
    search: ServingSearch | None = None,
) -> None:
    """Write the page of a service; see `perfmodel.report.page.service_report`."""
    estimator = setting.estimator
    runs = ("engine", f"{estimator.engine.name} {estimator.engine.version}", estimator.engine.source)
    peak = (estimator.machine.peak_flop_rate, str(estimator.machine.dtype))
    page = service_report(
        prediction,
        limits=limits,
        operators=operators_of(setting, prediction) if prediction.fits else [],
        start=start,
        command=command,
        sources=sources_table(setting.job.model, estimator.cluster, [estimator.calibration], peak, runs),
        result=search,
        more_notes=() if search is None else setting.notes,
    )
    write_atomically(out, page.html)


def read_search(path: str | Path) -> TrainingSearch:
    """Return the result of a training search from the file of `search --json`. Its plans are predicted again."""
    text = read_text(path, "JSON file")
    try:
        data = json.loads(text)
        data["plans"], data["num_evaluated"]
    except (ValueError, KeyError, TypeError):
        remedy = "write one with `perfmodel search ... --json > search.json`; a service has `perfmodel serve ... --report report.html`"
        raise bad_field("plans", path, "is no result of a training search", remedy) from None

    def predicted(name: str) -> tuple[Prediction, ...]:
        """Return the predictions of the plans of a field."""
        rule = {"memory_headroom": data["memory_headroom"] or None, "risk": data["risk"]}
        entries = data[name] if isinstance(data[name], list) else [data[name]]
        return tuple(predict_plan(plan_from_dict(entry["plan"], where=str(path)), **rule) for entry in entries if entry)

    objective = Objective(data["objective"])
    by_plan = {prediction.plan: prediction for prediction in predicted("plans")}
    return SearchResult(
        objective=objective,
        conditions=MemoryBudget(risk=data["risk"], **{name: data[f"memory_{name}"] for name in ("capacity", "usable", "headroom")}),
        plans=tuple(by_plan.values()),
        ranking=ranking_of(
            [(objective.cost(prediction), plan) for plan, prediction in by_plan.items()],
            data["ties"],
            len(by_plan),
            by_plan.__getitem__,
            places=tuple(entry["place"] for entry in data["plans"]),
            expectation=Expectation(**data["expectation"]) if data["expectation"] else None,
            least_time=data["least_time"] or math.inf,
        ),
        baselines=(),
        pareto=predicted("pareto"),
        least_memory=predicted("least_memory"),
        any_framework=predicted("any_framework"),
        **{name: data[name] for name in ("num_evaluated", "num_feasible", "rejected", "left_out", "search_time", "interrupted")},
    )
