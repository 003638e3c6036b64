"""Predictions as flat rows, for `--csv` and data frames: SI units, with the column names of `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.foundation.plain import picked
from perfmodel.parallel.plan import plan_facts
from perfmodel.parallel.training_run import training_cost, training_time

if TYPE_CHECKING:
    from perfmodel.parallel.interval import StepInterval
    from perfmodel.parallel.prediction import NotPredicted, Prediction

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
