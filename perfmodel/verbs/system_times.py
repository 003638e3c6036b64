"""Predictions of systems, for `explore`: of training or of a service, with a fixed plan or the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfmodel.foundation.columns import as_columns
from perfmodel.foundation.errors import InputError, bad_field, shown
from perfmodel.foundation.words import Words, words_of
from perfmodel.hardware.calibration import Provenance
from perfmodel.parallel.knobs import Knobs, ServingKnobs
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.parallel.request import Request, Service, ServingRequest
from perfmodel.parallel.serving_plan import ServingPlan
from perfmodel.parallel.serving_prediction import ServingPrediction
from perfmodel.planner.uniform.kept import KeptSpaces
from perfmodel.verbs.axes import System, spec_of

_OF_TRAINING = " ".join((*words_of(Request, Knobs), "workers"))
#: Records of a system's words: of training, and those that only a service has.
SYSTEM_WORDS: Mapping[str, type | Words] = {
    "asked": Request,
    "knobs": Knobs,
    "served": Words(Service, without=_OF_TRAINING),
}

#: Metric of a service -> its time in a prediction. [s, or s per token and chip]
METRICS: Mapping[str, Callable[[ServingPrediction], float]] = {
    "tpot": lambda prediction: prediction.tpot.mean,
    "ttft": lambda prediction: prediction.ttft.mean,
    "latency": lambda prediction: prediction.request_latency.mean,
    "throughput": lambda prediction: 1.0 / prediction.tokens_per_second_per_chip if prediction.tokens_per_second_per_chip > 0 else math.inf,
}
STEP_TIME = "step time"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SystemPredictor:
    """Predictor of systems: the metric, and whether the best plan is searched.

    kept_spaces   shared by the searches
    """

    metric: str
    is_searched: bool
    kept_spaces: KeptSpaces = field(default_factory=KeptSpaces)

    def predict(self, system: System, *, held: Plan | ServingPlan | None = None) -> Prediction | ServingPrediction:
        """Predict a system with its plan, the best one, or the fixed one in `held`. Raises InputError."""
        asked = _placed(system)
        if isinstance(asked, ServingRequest):
            assert isinstance(system.knobs, ServingKnobs)
            from perfmodel.cost.serving.simulated import predict_served
            from perfmodel.verbs.searching import search_service
            from perfmodel.verbs.serving_predict import serve_asked
            from perfmodel.verbs.serving_setting import serving_setting

            service = Service(request=asked, knobs=system.knobs)
            if isinstance(held, ServingPlan):
                service_setting = serving_setting(service)
                return predict_served(service_setting.estimator, service_setting.job, held.layout)
            if not self.is_searched:
                return serve_asked(service)[1]
            objective = "throughput" if self.metric == "throughput" else "latency"
            return search_service(service, limits={}, p99=False, objective=objective, top=1)[1].best.prediction
        from perfmodel.verbs.overrides import overridden
        from perfmodel.verbs.requests import setting_of_request
        from perfmodel.verbs.searching import search_in
        from perfmodel.verbs.setting import plan_in, predict_in

        assert isinstance(system.knobs, Knobs)
        rule = {"memory_headroom": asked.memory_headroom, "risk": asked.risk}
        setting = setting_of_request(asked)
        if isinstance(held, Plan):
            return predict_in(setting, overridden(held, setting, Knobs()), **rule)
        if not self.is_searched:
            return predict_in(setting, plan_in(setting, system.knobs), **rule)
        result = search_in(replace(setting, kept_spaces=self.kept_spaces), system.knobs, {}, top=1, ties=0.0, also=(), **rule)
        if not result.plans:
            raise InputError(f"chips={system.cluster.num_chips}: no plan fits on {system.cluster.name}; use more chips or larger memory")
        return result.plans[0]

    def predict_columns(self, systems: Sequence[System]) -> Sequence[Prediction | ServingPrediction | InputError]:
        """Predict the knobs' plan on training systems, as columns, or return why there is no prediction.

        The systems differ in floats of their clusters, or in the sizes of their jobs. Raises InputError if it is about all systems.
        """
        from perfmodel.cost.resolve import fresh_estimator
        from perfmodel.verbs.requests import predict_cases, setting_of_request
        from perfmodel.verbs.setting import annotated, constants_of, plan_in

        knobs = systems[0].knobs
        assert isinstance(knobs, Knobs)
        if any(system.asked != systems[0].asked for system in systems):
            smallest = min((system.cluster for system in systems), key=lambda cluster: cluster.num_chips)
            cases = []
            for system in systems:
                asked = _placed(replace(system, model=systems[0].model))
                assert isinstance(asked, Request)
                cases.append((replace(asked, cluster=smallest), knobs))
            return [outcome if isinstance(outcome, InputError) else outcome.prediction for outcome in predict_cases(cases)]
        asked = _placed(systems[0])
        assert isinstance(asked, Request)
        setting = setting_of_request(asked)
        plan = plan_in(setting, knobs)
        calibration, profile = constants_of(setting.cluster, asked.calibration, asked.profile, asked.settings)
        rates = [system.cluster.chip.peak_flop_rate for system in systems]
        if calibration.provenance is Provenance.PRIOR and any(chip_rates != rates[0] for chip_rates in rates):
            return [self.predict(system) for system in systems]  # a prior follows from the rates
        cluster = as_columns([system.cluster for system in systems])
        estimator = fresh_estimator(setting.job, cluster, calibration, profile)
        rule = {"memory_headroom": asked.memory_headroom, "risk": asked.risk}
        return [annotated(prediction, setting) for prediction in estimator.predict_columns([plan] * len(systems), **rule)]

    def time(self, prediction: Prediction | ServingPrediction) -> float:
        """Return the metric's time. [s]"""
        return prediction.step_time if isinstance(prediction, Prediction) else METRICS[self.metric](prediction)


def system_of(asked: Request, knobs: Knobs, served: Service) -> System:
    """Return the system that a request describes: a service if there are lengths of prompts and answers, else training.

    Raises InputError.
    """
    from perfmodel.verbs.requests import make_requests, setting_of_request
    from perfmodel.verbs.serving_setting import serving_setting

    if served.request.input_len is None and served.request.output_len is None:
        for name, value in served.given().items():
            raise bad_field(name, value, "is of a service", "give input_len and output_len too, or leave it out")
        requests = make_requests(asked)
        if len(requests) > 1:
            raise InputError("explore: takes one value of everything but its axes; name the others with vary")
        setting = setting_of_request(requests[0])
        spec = spec_of(asked.cluster)
        return System(asked=requests[0], knobs=knobs, cluster=setting.cluster, model=setting.job.transformer, spec=spec)
    shared = {name: getattr(asked, name) for name in ("model", "cluster", "chips", "calibration")}
    service = served.having({**shared, **{name: getattr(knobs, name) for name in ("tp", "pp", "ep")}})
    of = serving_setting(service)
    return System(asked=service.request, knobs=service.knobs, cluster=of.estimator.cluster, model=of.job.model, spec=spec_of(asked.cluster))


def _placed(system: System) -> Request | ServingRequest:
    """Return the request with the objects of the system."""
    asked = replace(system.asked, cluster=system.cluster, model=system.model, chips=system.cluster.num_chips)
    return asked if isinstance(asked, ServingRequest) else replace(asked, nodes=None)


def metric_of(system: System, metric: str) -> str:
    """Return the metric of a system: the step time of training. Raises InputError for an unknown one of a service."""
    if not system.is_service:
        return STEP_TIME
    if metric not in METRICS:
        raise bad_field("metric", shown(metric), "is not known", f"use {', '.join(METRICS)}")
    return metric
