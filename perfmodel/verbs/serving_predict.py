"""The verb `serve`, for Python: latencies, concurrency, throughput and bottlenecks of a service.

import perfmodel

found = perfmodel.serve(model="llama-3.3-70b", cluster="dgx-h100", chips=8, input_len=1024, output_len=1024, concurrency=64, tp=4)
print(found.ttft.mean, found.tpot.mean, found.tokens_per_second_per_chip)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from perfmodel.foundation.errors import InputError, bad_field
from perfmodel.foundation.values import check_name, read_integer, several
from perfmodel.foundation.words import Words, combinations, takes
from perfmodel.parallel.request import Service
from perfmodel.parallel.serving_plan import ServingLayout, ServingPlan
from perfmodel.parallel.serving_prediction import ServingPrediction, TokenCosts
from perfmodel.verbs.overrides import with_plan
from perfmodel.verbs.serving_setting import ServingSetting, serving_layout, serving_setting
from perfmodel.verbs.setting import Name
from perfmodel.workload.models import hub_id_of

if TYPE_CHECKING:
    from perfmodel.cost.serving.boundness import OperatorRow
    from perfmodel.frameworks.engine_launch import LaunchLine


Answer = TypeVar("Answer")

LISTED = ("cluster", "chips", "tp", "concurrency", "rate")
"""Fields that accept several values, the last varying fastest."""
MOST_REQUESTS = 1000
_THOUSANDS = re.compile(r"[1-9]\d{0,2},0\d\d", re.ASCII)
_WITH_CHIPS = Words(Service, needed="model cluster chips input_len output_len")


@takes(service=Words(Service, needed="model input_len output_len"))
def serve(*, service: Service) -> ServingPrediction:
    """Predict a served load on one plan: time to first token, time per output token, throughput and memory.

    Defaults: tp is the smallest that fits, replicas fill the chips, formats are those of the published model. Without concurrency and rate,
    the largest number of requests that fits runs concurrently.
    """
    return serve_asked(service)[1]


@takes(service=Service)
def serve_plan(plan: ServingPlan | Name, *, service: Service) -> ServingPrediction:
    """Predict the plan of a service, or that of its file, as `serve` does.

    Given fields replace those of the plan: another load the whole load, other workers or chips its degrees or replicas.
    """
    return serve_asked(with_plan(service, service_of(plan)))[1]


def service_of(plan: ServingPlan | Name) -> Service:
    """Return the service that reproduces a plan, or the plan of a file."""
    from perfmodel.parallel.plan_file import read_serving_plan, service_from_dict, serving_plan_to_dict

    check_name(plan, "plan", ServingPlan, "see `perfmodel serve --save`")
    return service_from_dict(serving_plan_to_dict(plan)) if isinstance(plan, ServingPlan) else read_serving_plan(plan)


def serve_asked(service: Service) -> tuple[ServingSetting, ServingPrediction]:
    """Return the result of `serve` with its setting; for a plan that does not fit also the smallest changes that fit."""
    setting, prediction = _served(service)
    if prediction.fits:
        return setting, prediction
    from perfmodel.planner.remedies import remedies_of_service

    of = setting.estimator
    remedies = remedies_of_service(
        service, prediction, engine=of.engine, cluster=of.cluster, predict=lambda changed: _served(changed, simulates=False)[1]
    )
    return setting, replace(prediction, remedies=remedies)


def _served(service: Service, *, simulates: bool = True) -> tuple[ServingSetting, ServingPrediction]:
    """Return the prediction of a service with its setting. simulates: whether its times are those of a simulation."""
    from perfmodel.cost.serving.disaggregated import predict_layout
    from perfmodel.cost.serving.simulated import predict_served

    setting = serving_setting(service)
    layout, notes = serving_layout(setting, service.knobs)
    prediction = (predict_served if simulates else predict_layout)(setting.estimator, setting.job, layout)
    return setting, replace(priced(setting, prediction), notes=(*prediction.notes, *setting.notes, *notes))


def priced(setting: ServingSetting, prediction: ServingPrediction) -> ServingPrediction:
    """Return the prediction with cost, energy and carbon of output tokens, on all given chips: idle ones cost and draw as much."""
    from perfmodel.cost.training_run import carbon_of, energy_of

    tokens, watts = prediction.tokens_per_second_per_chip * prediction.plan.num_chips, setting.chip_watts
    if not (tokens > 0.0 and prediction.fits):
        return replace(prediction, costs=TokenCosts(price_per_hour=setting.price))
    chip_hours = 1e6 / 3600.0 * setting.num_chips / tokens
    energy = float(energy_of(chip_hours, watts, setting.assumptions))
    costs = TokenCosts(
        price_per_hour=setting.price,
        cost_per_million=chip_hours * setting.price or None,
        energy_per_million=energy or None,
        carbon_per_million=float(carbon_of(energy, setting.assumptions)) or None,
    )
    return replace(prediction, costs=costs)


def simulated_in(
    setting: ServingSetting, prediction: ServingPrediction, *, limits: Mapping[str, Any] | None = None, seed: int = 0
) -> ServingPrediction:
    """Return the prediction of a step-by-step simulation of the engine, also at a rate; goodput counts requests within the limits."""
    from perfmodel.cost.serving.simulated import with_simulation

    seed = read_integer(seed, "seed", least=0)
    simulated = with_simulation(setting.estimator, prediction, limits=limits_of(limits or {}), seed=seed)
    return priced(setting, simulated)


def limit_of(value: object, name: str) -> float:
    """Return a time limit from `500ms`, `.5s` or seconds; infinite if none is given. [s]"""
    from perfmodel.foundation.units import parse_quantity

    if value in (None, ""):
        return float("inf")
    if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+\s*", value):
        number = value.strip()
        raise bad_field(name, number, "a time needs its unit", f"write {number}ms or {number}s")
    seconds = float(value) if isinstance(value, (int, float)) else parse_quantity(value, "time", field=name)
    if not seconds > 0:
        raise bad_field(name, value, "must be positive", "write 500ms")
    return seconds


def limits_of(given: Mapping[str, Any]) -> dict[str, float]:
    """Return metric -> limit, for the given limits. [s]"""
    times = {name: limit_of(value, name) for name, value in given.items()}
    return {name: time for name, time in times.items() if time < float("inf")}


def launch_of(setting: ServingSetting, prediction: ServingPrediction) -> tuple[LaunchLine, ...]:
    """Return the commands that start a plan; empty for one that does not fit or run, or for an engine without a known command."""
    from perfmodel.frameworks.engine_launch import launch_lines

    if not prediction.fits or prediction.not_runnable:
        return ()
    node = setting.estimator.cluster.chips_per_node
    try:
        hub_id = setting.hub_id or hub_id_of(prediction.job.model.name)
        model = hub_id if "/" in hub_id else "MODEL"
        return launch_lines(prediction.plan, setting.estimator.engine, model=model, chips_per_node=node)
    except InputError:
        return ()


@takes(service=_WITH_CHIPS)
def serve_operators(*, service: Service) -> list[OperatorRow]:
    """Return every operator of a decode step and of the prefill of a prompt, as `serve` has them: shape, FLOP, bytes, time, bound."""
    return operators_asked(service)[2]


def operators_asked(service: Service) -> tuple[ServingSetting, ServingPrediction, list[OperatorRow]]:
    """Return the plan with every operator of a decode step and of a prefill: shape, work, time and bottleneck."""
    setting, prediction = serve_asked(service)
    if prediction.plan.pools is not None:
        raise bad_field("workers", prediction.plan.label(), "--operators is of workers that do both", "leave one of them out")
    return setting, prediction, operators_of(setting, prediction)


def operators_of(setting: ServingSetting, prediction: ServingPrediction) -> list[OperatorRow]:
    """Return every operator of a decode step and of a prefill in the prediction's formats; empty for disaggregated serving."""
    from perfmodel.cost.serving.boundness import operator_rows

    layout, job = prediction.plan.layout, prediction.job
    if not isinstance(layout, ServingLayout):
        return []
    estimator = replace(setting.estimator, quantization=job.quantization, cache=job.kv_precision)  # a search chooses among formats
    costs = estimator.times([layout])
    rows = operator_rows(costs, phase="decode", sequences=max(prediction.load.running, 1.0), cached=job.mean_context)
    rows += operator_rows(costs, phase="prefill", tokens=job.new_tokens, cached=job.input_len.mean - job.new_tokens)
    return rows


# --- Several services ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """One request of several.

    asked       fields with several values
    prediction  None if it cannot be predicted; reason: why not
    """

    asked: Mapping[str, Any]
    prediction: ServingPrediction | None
    reason: str = ""


@takes(service=_WITH_CHIPS)
def serve_several(*, service: Service) -> list[AnsweredRequest]:
    """`serve` for every combination of several clusters, chips, tp, and concurrencies or rates (lists, or texts such as `16,64`)."""
    return served_several(services_in(service))


def services_in(service: Service) -> list[Service]:
    """Return every combination of the values. Raises InputError."""
    values: dict[str, list[Any]] = {}
    for name in LISTED:
        given = service.given().get(name)
        if isinstance(given, str) and name != "cluster" and _THOUSANDS.search(given):
            raise bad_field(name, given, "is a list of two numbers", f"write {given.replace(',', '')} for one number")
        values[name] = list(dict.fromkeys(several(given))) or [None]
    number = math.prod(map(len, values.values()))
    if number > MOST_REQUESTS:
        rule = f"make {number:,} combinations, and {MOST_REQUESTS:,} is the most"
        raise InputError(f"{', '.join(name for name in LISTED if len(values[name]) > 1)}: {rule}; give fewer values")
    return [service.having(chosen) for chosen in combinations(values)]


def served_several(services: list[Service]) -> list[AnsweredRequest]:
    """Predict each service; those that cannot be predicted have a reason. Raises the first reason if none can be predicted."""
    answers = answered_each(services, lambda service: serve_asked(service)[1])
    return [AnsweredRequest(asked=asked, prediction=prediction, reason=reason) for asked, prediction, reason in answers]


def answered_each(services: list[Service], answer: Callable[[Service], Answer]) -> list[tuple[dict[str, Any], Answer | None, str]]:
    """Return (varied words, answer or None, reason of the failure) of each service. Raises the first reason if all fail."""
    words = [service.given() for service in services]
    varied = [name for name in LISTED if len({str(given.get(name)) for given in words}) > 1]
    answers: list[tuple[dict[str, Any], Answer | None, str]] = []
    errors: list[InputError] = []
    for service, given in zip(services, words, strict=True):
        asked = {name: given.get(name) for name in varied}
        try:
            answers.append((asked, answer(service), ""))
        except InputError as error:
            errors.append(error)
            answers.append((asked, None, str(error)))
    if len(errors) == len(answers):
        raise errors[0]
    return answers
