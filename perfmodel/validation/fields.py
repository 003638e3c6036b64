"""Values of a published run's fields, which `schemas.py` checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError, one_line
from perfmodel.workload.job import Precision
from perfmodel.workload.quantization import ALIASES

#: Precision of a training run -> (policy of the job, dtype of the matrix multiplies).
PRECISIONS: Mapping[str, tuple[Precision, Dtype]] = {
    "bf16": (Precision.BF16_MIXED, Dtype.BF16),
    "fp16": (Precision.FP16_MIXED, Dtype.FP16),
    "bfloat16": (Precision.BF16_MIXED, Dtype.BF16),
    "float16": (Precision.FP16_MIXED, Dtype.FP16),
    "fp32": (Precision.FP32, Dtype.FP32),
    "tf32": (Precision.FP32, Dtype.TF32),
    "fp8": (Precision.FP8_DELAYED, Dtype.FP8),
    "mxfp8": (Precision.MXFP8, Dtype.FP8),
    "nvfp4": (Precision.NVFP4, Dtype.FP4),
    "mxfp4": (Precision.NVFP4, Dtype.FP4),
}
#: Precision of a serving run -> format of its weights.
SERVED_PRECISIONS: Mapping[str, str] = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "bf16", "fp8": "fp8", "nvfp4": "nvfp4", "fp4": "nvfp4",
    "mxfp4": "mxfp4", "w4a16": "w4a16", "int8": "int8", "w4a8": "w4a8", **ALIASES,
}  # fmt: skip
#: Format of a KV cache -> its dtype; None: the engine's default.
CACHES: Mapping[str, Dtype | None] = {"bf16": Dtype.BF16, "bfloat16": Dtype.BF16, "fp16": Dtype.FP16, "fp8": Dtype.FP8, "auto": None}

#: Kinds of serving runs, by what was measured.
SERVING_KINDS = ("static_batch", "serving", "max_throughput", "decode_step", "ttft_only")

UNKNOWN = "?"
"""Label of a run that does not state the field."""


def optional_count(inputs: Mapping[str, Any], field: str) -> int | None:
    """Return a checked integer, or None where the run does not state it. 8.0 is 8."""
    value = inputs.get(field)
    return None if value is None else int(value)


def stated_or(inputs: Mapping[str, Any], field: str, default: Any, assumed: list[str]) -> Any:
    """Return what the run states, else the default; then the field is added to the assumed ones."""
    if inputs.get(field) is None:
        assumed.append(field)
        return default
    return inputs[field]


def stated_count(inputs: Mapping[str, Any], field: str, default: int | None = None, *, within: str = "", name: str = "it") -> int:
    """Return a checked integer, or the default; without one the run must state it. Raises InputError.

    within   prefix of the field, such as `model.`; name: of what cannot be predicted without it
    """
    value = inputs.get(field, default)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{within}{field}: the run does not state it; {name} cannot be predicted without it")
    return int(value)


def positive(value: object) -> float:
    """Return `value` as a positive number, else nan."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) and number > 0 else math.nan


def label(value: object) -> str:
    return one_line(value, 60) or UNKNOWN if isinstance(value, str) else UNKNOWN


def known_label(value: str | float) -> str | float | None:
    """Return a label, or None where it is unknown."""
    return None if value == UNKNOWN else value
