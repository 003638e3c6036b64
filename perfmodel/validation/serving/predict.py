"""Published runs of serving predicted one after the other; what they share (clusters, machines, compiled programs) is made once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.errors import one_line
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.validation.cases import Case
from perfmodel.validation.failures import FAILURES, NOT_FINITE, reason_of
from perfmodel.validation.serving.cases import PlannedServing, plan_of_serving
from perfmodel.validation.serving.rows import ServingRow, labels_of_serving

Predict = Callable[[PlannedServing], ServingPrediction]


@dataclass(slots=True, kw_only=True)
class ServingCasePredictor:
    """predict: the prediction of a planned run; None: as `serve` prints it."""

    calibration: str | Path | None = None
    predict: Predict | None = None
    plans: dict[str, PlannedServing] = field(default_factory=dict)

    def row(self, case: Case) -> ServingRow:
        assert case.served is not None
        row = ServingRow(
            id=case.id,
            group=case.group,
            tier=case.tier,
            kind=one_line(case.inputs.get("kind") or "", 40),
            served=case.served,
            labels=labels_of_serving(case.inputs, group=case.group, tier=case.tier, planned=None),
            reason=case.reason,
        )
        if case.reason:
            return row
        try:
            planned = self.plan(case.inputs)
            row = replace(
                row,
                kind=planned.kind,
                planned=planned,
                labels=labels_of_serving(case.inputs, group=case.group, tier=case.tier, planned=planned),
            )
            return with_prediction(row, self._predict(planned))
        except FAILURES as error:
            return replace(row, reason=reason_of(error))

    def plan(self, inputs: Mapping[str, Any]) -> PlannedServing:
        """Runs that print one configuration again share its plan."""
        key = json.dumps(inputs, sort_keys=True, default=str)
        found = self.plans.get(key)
        if found is None:
            found = self.plans[key] = plan_of_serving(inputs)
        return found

    def _predict(self, planned: PlannedServing) -> ServingPrediction:
        if self.predict is None:
            from perfmodel.validation.serving.estimators import Estimators

            self.predict = Estimators(calibration=self.calibration).as_served
        return self.predict(planned)


def with_prediction(row: ServingRow, prediction: ServingPrediction) -> ServingRow:
    """The metrics that are compared of such a run."""
    planned = row.planned
    assert planned is not None
    predicted = metrics_of(planned, prediction)
    if not all(math.isfinite(value) for value in predicted.values()):
        return replace(row, reason=NOT_FINITE)
    held = dict(prediction.intervals)
    if "tokens_per_second" in held:  # those are of one chip
        low, high = held["tokens_per_second"]
        held["tokens_per_second"] = low * planned.plan.num_chips, high * planned.plan.num_chips
    intervals = {metric: held[metric] for metric in predicted if metric in held}
    return replace(
        row,
        predicted=MappingProxyType(predicted),
        intervals=MappingProxyType(intervals),
        predicted_fits=prediction.fits,
        max_sequences=prediction.max_sequences,
    )


def metrics_of(planned: PlannedServing, prediction: ServingPrediction) -> dict[str, float]:
    """Predicted metrics that a run of this kind is compared with."""
    rate = prediction.tokens_per_second_per_chip * planned.plan.num_chips
    latency = prediction.request_latency.mean
    match planned.kind:
        case "ttft_only":
            return {"ttft": prediction.ttft.mean}
        case "max_throughput":
            return {"tokens_per_second": rate}
        case "decode_step":
            return {"ttft": prediction.prefill_time, "tpot": prediction.decode_step}
        case "static_batch":
            batch = planned.job.concurrency or 1
            return {
                "ttft": prediction.ttft.mean,
                "tpot": prediction.tpot.mean,
                "request_latency": latency,
                "tokens_per_second": batch * planned.job.output_len.mean / latency,
            }
        case _:
            return {"ttft": prediction.ttft.mean, "tpot": prediction.tpot.mean, "request_latency": latency, "tokens_per_second": rate}
