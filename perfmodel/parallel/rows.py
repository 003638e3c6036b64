"""Predictions as flat rows, for `--csv` and data frames: SI units, with the column names of `--json`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.plain import picked
from perfmodel.parallel.plan import plan_facts
from perfmodel.parallel.serving_plan import COLUMNS
from perfmodel.parallel.training_run import training_cost, training_time

if TYPE_CHECKING:
    from perfmodel.parallel.interval import StepInterval
    from perfmodel.parallel.prediction import NotPredicted, Prediction
    from perfmodel.parallel.serving_prediction import ServingPrediction

TIMES = ("ttft", "tpot", "inter_token", "request_latency")
"""Times of a request, each with its spread over requests."""

_PERCENTILES = ("mean", "p50", "p90", "p99")
_JOB = ("model", "cluster", "chips", "global_batch", "seq_len", "precision", "optimizer", "train", "profile", "settings")


def table_rows(
    predictions: Sequence[Prediction],
    failures: Iterable[NotPredicted] = (),
    *,
    tokens: float = 0.0,
    intervals: Sequence[StepInterval] = (),
) -> list[dict[str, Any]]:
    """Return a row for each prediction, then one with its reason for each combination that cannot be predicted.

    intervals   of the step times, one for each prediction; empty: none
    """
    bounds: Sequence[StepInterval | None] = intervals or [None] * len(predictions)
    rows = [prediction_row(prediction, tokens=tokens, interval=interval) for prediction, interval in zip(predictions, bounds, strict=True)]
    return [*rows, *map(not_predicted_row, failures)]


def prediction_row(prediction: Prediction, *, tokens: float = 0.0, interval: StepInterval | None = None) -> dict[str, Any]:
    """Return the job, the knobs, the results, the parts of the step and the classes of memory; with an interval its bounds [s]."""
    row: dict[str, Any] = plan_facts(prediction.plan) | {
        "order": "-".join(prediction.plan.order),
        "calibration": prediction.conditions.calibration,
        **picked(prediction, "step_time tokens_per_second_per_chip tflops_per_chip mfu_palm mfu_causal hfu"),
        "memory_total": prediction.memory["total"],
        **picked(prediction, "memory_usable memory_spare memory_low memory_high fits fits_probability"),
        "verdict": str(prediction.verdict),
    }
    if interval is not None:
        row |= {"step_time_low": prediction.step_time * interval.low, "step_time_high": prediction.step_time * interval.high}
    if tokens:
        row["tokens"] = tokens
        row["days"], row["chip_hours"] = training_time(prediction, tokens)
        row["cost"] = training_cost(prediction, tokens) or None
    row |= {f"time_{part}": time for part, time in prediction.parts.items()}
    row |= {f"memory_{kind}": size for kind, size in without_total(prediction.memory).items()}
    return row | {"warnings": "; ".join(prediction.warnings), "reason": ""}


def not_predicted_row(failure: NotPredicted) -> dict[str, Any]:
    return {name: failure.asked[name] for name in _JOB if name in failure.asked} | {"reason": failure.reason}


def without_total(memory: Mapping[str, float]) -> dict[str, float]:
    """Return the classes of a memory."""
    return {name: size for name, size in memory.items() if name != "total"}


def serving_row(prediction: ServingPrediction) -> dict[str, Any]:
    """Return job, plan, results, decode-step parts and memory classes as one row."""
    job, plan = prediction.job, prediction.plan.to_dict()
    degrees = {name: plan.get(name) for name in COLUMNS}
    row: dict[str, Any] = {
        "model": job.model.name,
        "cluster": prediction.cluster,
        "chips": prediction.plan.num_chips,
        "input_len": job.input_len.most,
        "input_len_least": job.input_len.least,
        "output_len": job.output_len.most,
        "output_len_least": job.output_len.least,
        **picked(job, "concurrency rate prefix_hit"),
        "engine": prediction.plan.engine,
        "quantization": job.quantization.name,
        "kv_precision": str(job.kv_precision),
        **degrees,
        "workers": plan.get("workers", ""),
        "fits": prediction.fits,
        "fits_load": prediction.load.fits,
        "is_saturated": prediction.load.is_saturated,
    }
    for name in TIMES:
        spread = getattr(prediction, name)
        row |= {name if which == "mean" else f"{name}_{which}": _finite(getattr(spread, which)) for which in _PERCENTILES}
    row |= throughput_object(prediction) | {
        "queued": _finite(prediction.load.queued),
        "memory_total": prediction.memory["total"],
        "memory_usable": prediction.memory_usable,
    }
    row |= interval_bounds(prediction.intervals)
    row |= {f"time_{part}": time for part, time in prediction.parts.items()}
    row |= {f"memory_{kind}": size for kind, size in without_total(prediction.memory).items()}
    return row | {"notes": "; ".join(prediction.notes), "reason": ""}


def throughput_object(prediction: ServingPrediction) -> dict[str, Any]:
    """Return throughput, price, concurrency and step times, in SI units, for `--json` and CSV."""
    costs = prediction.costs
    return {
        **picked(prediction, "tokens_per_second_per_chip tokens_per_second_per_user requests_per_second"),
        "goodput": prediction.load.goodput,
        "price_per_hour": costs.price_per_hour or None,
        "cost_per_million_tokens": costs.cost_per_million,
        "energy_per_million_tokens": costs.energy_per_million,
        "carbon_per_million_tokens": costs.carbon_per_million,
        **picked(prediction.load, "running queued"),
        **picked(prediction, "max_sequences decode_step prefill_time"),
    }


def interval_bounds(intervals: Mapping[str, tuple[float, float]]) -> dict[str, float | None]:
    return {
        f"{name}_{end}": _finite(bound) for name, bounds in intervals.items() for end, bound in zip(("low", "high"), bounds, strict=True)
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
