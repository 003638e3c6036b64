"""Predictions as flat rows, one for each, for spreadsheets: SI units, the columns named as in `--json`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfmodel.parallel.plan import plan_facts
from perfmodel.parallel.prediction import NotPredicted, Prediction
from perfmodel.parallel.residuals import StepInterval
from perfmodel.report.predictions import training_cost, training_time

_JOB = ("model", "cluster", "chips", "global_batch", "seq_len", "precision", "optimizer", "train", "profile", "settings")


def prediction_row(prediction: Prediction, *, tokens: float = 0.0, interval: StepInterval | None = None) -> dict[str, Any]:
    """Return the job, the knobs, the results, the parts of the step and the classes of memory; with an interval its ends [s]."""
    row: dict[str, Any] = plan_facts(prediction.plan) | {
        "order": "-".join(prediction.plan.order),
        "calibration": prediction.calibration,
        "step_time": prediction.step_time,
        "tokens_per_second_per_chip": prediction.tokens_per_second_per_chip,
        "tflops_per_chip": prediction.tflops_per_chip,
        "mfu_palm": prediction.mfu_palm,
        "mfu_causal": prediction.mfu_causal,
        "hfu": prediction.hfu,
        "memory_total": prediction.memory["total"],
        "memory_usable": prediction.memory_usable,
        "memory_spare": prediction.memory_spare,
        "memory_low": prediction.memory_low,
        "memory_high": prediction.memory_high,
        "fits": prediction.fits,
        "fits_probability": prediction.fits_probability,
        "verdict": str(prediction.verdict),
    }
    if interval is not None:
        row |= {"step_time_low": prediction.step_time * interval.low, "step_time_high": prediction.step_time * interval.high}
    if tokens:
        row["tokens"] = tokens
        row["days"], row["chip_hours"] = training_time(prediction, tokens)
        row["cost"] = training_cost(prediction, tokens) or None
    row |= {f"time_{part}": time for part, time in prediction.parts.items()}
    row |= {f"memory_{kind}": size for kind, size in prediction.memory.items() if kind != "total"}
    return row | {"warnings": "; ".join(prediction.warnings), "reason": ""}


def not_predicted_row(failure: NotPredicted) -> dict[str, Any]:
    return {name: failure.asked[name] for name in _JOB if name in failure.asked} | {"reason": failure.reason}


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows under one header; what a row does not have is empty."""
    known = list(rows)
    header: Sequence[str] = list(dict.fromkeys(name for row in known for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    for row in known:
        writer.writerow({name: str(value).lower() if isinstance(value, bool) else value for name, value in row.items()})
    return text.getvalue()
