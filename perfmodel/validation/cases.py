"""Cases files of published runs: the inputs of a prediction are separated from the measurements.

The file has one JSON object a line. Each line becomes one `Case`; a fault of the line is the case's `reason`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.files import open_input
from perfmodel.validation.expert_cases import has_experts
from perfmodel.validation.fields import positive
from perfmodel.validation.fine_tuning import states_training, trains_adapters
from perfmodel.validation.schemas import CaseFile
from perfmodel.validation.serving.measured import Served, is_serving, served_of
from perfmodel.workload.training import Method

#: Fields that describe or judge a run: they never reach a prediction. Everything else in a case is an input.
NOT_INPUTS = (*CaseFile.model_fields, "measured")

_MAX_ID = 200
MAX_LINE_BYTES = 2**20
MAX_FILE_BYTES = 2**30
_GIB = 2.0**30

STEP_METRICS = ("step_time", "memory")
"""Metrics of a training run; those of a service are `METRICS`."""

#: Format in which notes give the bandwidth of an all-reduce inside the node, in GB/s: "... (intra 423.7/241.59/240.63)".
_NOTED_ALL_REDUCE = re.compile(r"\(intra (\d+(?:\.\d+)?)/", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of a cases file.

    inputs             inputs of a prediction
    group              source of the run (for the summary only)
    measured_time      step time; nan where the run states none   [s]
    measured_memory    of the fullest chip; nan where unknown     [byte]
    ran                True / False where the run is known to have fitted / to have run out of memory; None: not known
    trains_adapters    it trains adapters only: predicted so, and neither fitted nor scored
    noted_all_reduce   bandwidth of an all-reduce in the node in its notes (a filter of judged runs only); nan: none   [byte/s]
    served             measurements of a serving run; None: a training run
    reason             fault of the line itself ("" if none)
    """

    id: str
    inputs: Mapping[str, Any]
    group: str = ""
    measured_time: float = math.nan
    measured_memory: float = math.nan
    ran: bool | None = None
    noted_all_reduce: float = math.nan
    tier: str = ""
    trains_adapters: bool = False
    has_experts: bool = False
    served: Served | None = None
    reason: str = ""

    @property
    def is_apart(self) -> bool:
        """The case is predicted, but neither fitted nor scored with the others."""
        return self.trains_adapters or self.has_experts

    @property
    def suspect(self) -> str:
        """Reason why the run is not scored; empty for none."""
        return "" if self.served is None else self.served.suspect

    def measured(self, metric: str) -> float:
        """Return a metric of the run, of `STEP_METRICS` or of a service's `METRICS`; nan where it states none."""
        if self.served is not None:
            return float(getattr(self.served, metric))
        return self.measured_time if metric == "step_time" else self.measured_memory


def read_cases(path: str | Path) -> Iterator[Case]:
    """Yield the cases of a file (`.gz`: decompressed), in order, without empty lines. Raise InputError only for an unreadable file."""
    try:
        with open_input(path) as opened:
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=opened)) if Path(path).suffix == ".gz" else opened
            for number, line in enumerate(_lines(stream, path), 1):
                if len(line) > MAX_LINE_BYTES:
                    yield Case(id=f"line-{number}", inputs={}, reason=f"line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; correct it")
                elif line.strip():
                    yield parse_case(line, number)
    except InputError:
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(
            f"cases={one_line(path, 200)}: cannot be read ({one_line(reason)}); give a file with one JSON object a line"
        ) from None


def _lines(stream: BinaryIO, path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file, an overlong one truncated. Raise InputError past the limit of the file's size."""
    num_bytes_read = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            num_bytes_read += len(rest)
            if num_bytes_read > MAX_FILE_BYTES:
                break
            rest = stream.readline(MAX_LINE_BYTES + 1)
        num_bytes_read += len(rest)
        if num_bytes_read > MAX_FILE_BYTES:
            raise InputError(
                f"cases={one_line(path, 200)}: larger than {MAX_FILE_BYTES >> 20} MiB; give a file with one JSON object a line"
            )
        yield line


def parse_case(line: bytes | str, number: int) -> Case:
    """Return the case on line `number` (from 1)."""
    fallback = f"line-{number}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError, MemoryError) as error:
        summary = one_line(str(error) or type(error).__name__, 120)
        return Case(id=fallback, inputs={}, reason=f"line {number}: not a JSON object ({summary}); correct the line")
    if not isinstance(data, dict):
        return Case(id=fallback, inputs={}, reason=f"line {number}: must be a JSON object, not a {type(data).__name__}; correct the line")
    name = data.get("id")
    identity = (one_line(name, _MAX_ID) if isinstance(name, (str, int)) and not isinstance(name, bool) else "") or fallback
    if is_serving(data):
        return Case(
            id=identity,
            inputs=inputs_of(data),
            group=re.split("[-_]", _group(data, identity))[0] or "?",
            tier=_tier(data),
            ran=True if data.get("measured") else None,
            served=served_of(data),
        )
    measured = data.get("measured")
    time, memory = _measured(data, measured if isinstance(measured, dict) else {})
    inputs = inputs_of(data)
    notes = data.get("notes")
    notes = notes[:5000] if isinstance(notes, str) else ""
    text = f"{data.get('id')} {notes}".lower()
    # fine-tuning of all weights is training
    if not states_training(inputs) and re.search(r"(?<![a-z])lora(?![a-z])", text) is not None and "task=sft" not in text:
        inputs["train"] = str(Method.LORA)
    match = _NOTED_ALL_REDUCE.search(notes)
    return Case(
        id=identity,
        inputs=inputs,
        trains_adapters=trains_adapters(inputs),
        has_experts=has_experts(inputs.get("model")),
        group=_group(data, identity),
        measured_time=time,
        measured_memory=memory,
        ran=False if data.get("outcome") == "out_of_memory" else None if math.isnan(time) else True,
        noted_all_reduce=float(match[1]) * 1e9 if match else math.nan,
        tier=_tier(data),
    )


def _tier(data: Mapping[str, Any]) -> str:
    return one_line(data.get("tier") or "", 40) if isinstance(data.get("tier"), (str, int, float)) else ""


def inputs_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the case without the fields that a prediction must not depend on."""
    return {key: value for key, value in data.items() if key not in NOT_INPUTS}


def _measured(data: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[float, float]:
    """Return (step time, memory). A run that states tokens/s instead of a time gets the time that follows from them."""
    if data.get("packed") is False:
        # sequences are truncated to the stated length or shorter: the peak is that of the longest, a step time averages over all of them
        return math.nan, positive(measured.get("peak_memory_gib")) * _GIB
    time = positive(measured.get("step_time_s"))
    if math.isnan(time):
        rate = positive(measured.get("tokens_per_s_per_chip"))
        sizes = [positive(data.get(name)) for name in ("global_batch", "sequence_length", "num_chips")]
        time = sizes[0] * sizes[1] / (rate * sizes[2])
        time = time if math.isfinite(time) and time > 0 else math.nan
    return time, positive(measured.get("peak_memory_gib")) * _GIB


def _group(data: Mapping[str, Any], identity: str) -> str:
    """Return the source of a run: the first word of its id, else of its framework."""
    prefix = identity.split("-")[0].strip().lower()
    if data.get("id") is None:
        prefix = one_line(data.get("framework") or "").split(" ")[0].lower()
    return one_line(prefix, 24) or "?"


FAILURES = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, AssertionError, MemoryError, RecursionError)
"""Errors of a prediction. One that is no `InputError` is a bug of perfmodel: it is reported, and the other cases still count."""

NOT_FINITE = "the prediction is not a finite number; please report this case"


def reason_of(error: Exception) -> str:
    if isinstance(error, InputError):
        return one_line(error, 400)
    return f"the prediction failed ({type(error).__name__}: {one_line(error, 200)}); please report this case"
