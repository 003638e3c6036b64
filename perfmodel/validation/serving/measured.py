"""Measured values of a published serving run, and its notes: never an input of a prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Measured metrics of a serving run, in seconds and output tokens a second of all chips; nan where the run states none.

    suspect       reason why the run is not scored; "" for none
    ttft_note     additional parts of its time to first token (queueing, start-up); "" for none
    repeat_group  runs that repeat one configuration with other values
    """

    ttft: float = math.nan
    tpot: float = math.nan
    request_latency: float = math.nan
    tokens_per_second: float = math.nan
    suspect: str = ""
    ttft_note: str = ""
    repeat_group: str = ""


def is_serving(data: Mapping[str, Any]) -> bool:
    """Return whether a line is a serving run, by its fields."""
    if "sequence_length" in data or "global_batch" in data:
        return False
    measured = data.get("measured")
    stated = isinstance(measured, Mapping) and any(field in measured for field in MEASURED_FIELDS)
    return stated or any(field in data for field in SERVING_FIELDS)


def served_of(data: Mapping[str, Any]) -> Served:
    """Return measured metrics, and those that follow by definition (latency = TTFT + (O - 1) TPOT, tokens/s = batch O / latency)."""
    measured = data.get("measured")
    measured = measured if isinstance(measured, Mapping) else {}
    ttft, tpot, latency = (positive(measured.get(field)) * 1e-3 for field in MEASURED_FIELDS[:3])
    rate, batch = positive(measured.get("tokens_per_s")), positive(data.get("batch"))
    nominal = positive(data.get("output_len"))
    answer = positive(data.get("output_len_mean"))
    answer = nominal if math.isnan(answer) else answer
    if math.isnan(latency) and data.get("kind") != "decode_step":
        latency = ttft + (answer - 1.0) * tpot
        if math.isnan(latency) and data.get("kind") == "static_batch":
            latency = batch * answer / rate
    note = data.get("metric_note")
    return Served(
        ttft=ttft,
        tpot=tpot,
        request_latency=latency,
        tokens_per_second=rate,
        suspect=_text(data.get("suspect")),
        ttft_note=_text(note) if isinstance(note, str) and ("queue" in note or "start-up" in note) else "",
        repeat_group=_text(data.get("repeat_group")),
    )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "marked in the data, without a reason" if value else ""
    return one_line(value, 300) if isinstance(value, (str, int, float)) else ""
