"""Measured values of a published run, and remarks on them: never an input of a prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perfmodel.foundation.errors import one_line
from perfmodel.validation.fields import positive
from perfmodel.validation.schemas import MeasuredServing

#: Fields that identify a case as a serving run.
SERVING_FIELDS = (
    "input_len", "output_len", "input_len_mean", "output_len_mean", "chip_id", "chips", "kv_precision", "disaggregated", "disagg", "kind",
    "repeated_prompts", "speculative", "draft_tokens", "batch", "parallel",
)  # fmt: skip
MEASURED_FIELDS = (*MeasuredServing.model_fields,)

_GIB = 2.0**30


def is_serving(data: Mapping[str, Any]) -> bool:
    """Return whether a line is a serving run, by its fields."""
    if "sequence_length" in data or "global_batch" in data:
        return False
    measured = data.get("measured")
    stated = isinstance(measured, Mapping) and any(field in measured for field in MEASURED_FIELDS)
    return stated or any(field in data for field in SERVING_FIELDS)


def measured_step(data: Mapping[str, Any]) -> dict[str, float]:
    """Return step time [s] and memory [byte]. A run that states tokens/s instead of a time gets the time that follows from them."""
    measured = _measured(data)
    memory = positive(measured.get("peak_memory_gib")) * _GIB
    if data.get("packed") is False:
        # sequences are truncated to the stated length or shorter: the peak is that of the longest, a step time averages over all of them
        return _stated(memory=memory)
    time = positive(measured.get("step_time_s"))
    if math.isnan(time):
        rate = positive(measured.get("tokens_per_s_per_chip"))
        sizes = [positive(data.get(name)) for name in ("global_batch", "sequence_length", "num_chips")]
        time = positive(sizes[0] * sizes[1] / (rate * sizes[2]))
    return _stated(step_time=time, memory=memory)


def measured_service(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a service, in seconds and output tokens a second of all chips.

    Some follow by definition: latency = TTFT + (O - 1) TPOT, of a static batch tokens/s = batch O / latency.
    """
    measured = _measured(data)
    ttft, tpot, latency = (positive(measured.get(field)) * 1e-3 for field in MEASURED_FIELDS[:3])
    rate, batch = positive(measured.get("tokens_per_s")), positive(data.get("batch"))
    nominal = positive(data.get("output_len"))
    answer = positive(data.get("output_len_mean"))
    answer = nominal if math.isnan(answer) else answer
    if math.isnan(latency) and data.get("kind") != "decode_step":
        latency = ttft + (answer - 1.0) * tpot
        if math.isnan(latency) and data.get("kind") == "static_batch":
            latency = batch * answer / rate
    return _stated(ttft=ttft, tpot=tpot, request_latency=latency, tokens_per_second=rate)


def _measured(data: Mapping[str, Any]) -> Mapping[str, Any]:
    measured = data.get("measured")
    return measured if isinstance(measured, Mapping) else {}


def _stated(**metrics: float) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def suspicion(data: Mapping[str, Any]) -> str:
    """Return why a serving run is not scored; "" for no reason."""
    value = data.get("suspect")
    if isinstance(value, bool):
        return "marked in the data, without a reason" if value else ""
    return _text(value)


def first_token_note(data: Mapping[str, Any]) -> str:
    """Return the note on additional parts of the time to first token (queueing, start-up); "" for none."""
    note = data.get("metric_note")
    return _text(note) if isinstance(note, str) and ("queue" in note or "start-up" in note) else ""


def _text(value: object) -> str:
    return one_line(value, 300) if isinstance(value, (str, int, float)) else ""
