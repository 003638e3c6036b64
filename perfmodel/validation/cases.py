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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from perfmodel.foundation.errors import InputError, one_line
from perfmodel.foundation.files import open_input
from perfmodel.validation.expert_cases import has_experts
from perfmodel.validation.fine_tuning import states_training, trains_adapters
from perfmodel.validation.measured import first_token_note, is_serving, measured_service, measured_step, suspicion
from perfmodel.validation.schemas import CaseFile
from perfmodel.workload.training import Method

#: Fields that describe or judge a run: they never reach a prediction. Everything else in a case is an input.
NOT_INPUTS = (*CaseFile.model_fields, "measured")

_MAX_ID = 200
MAX_LINE_BYTES = 2**20
MAX_FILE_BYTES = 2**30

STEP_METRICS = ("step_time", "memory")
"""Metrics of a training run; those of a service are `METRICS`."""

#: Format in which notes give the bandwidth of an all-reduce inside the node, in GB/s: "... (intra 423.7/241.59/240.63)".
_NOTED_ALL_REDUCE = re.compile(r"\(intra (\d+(?:\.\d+)?)/", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of a cases file.

    inputs             inputs of a prediction
    group              source of the run (for the summary only)
    is_serving         a serving run, else a training run
    measurements       stated metric -> value: of `STEP_METRICS` [s, byte], or of a service's `METRICS` [s, tokens/s]
    suspect            reason why the run is not scored ("" if none)
    first_token_note   additional parts of the time to first token (queueing, start-up); "" for none
    ran                True / False where the run is known to have fitted / to have run out of memory; None: not known
    trains_adapters    it trains adapters only: predicted so, and neither fitted nor scored
    noted_all_reduce   bandwidth of an all-reduce in the node in its notes (a filter of judged runs only); nan: none   [byte/s]
    reason             fault of the line itself ("" if none)
    """

    id: str
    inputs: Mapping[str, Any]
    group: str = ""
    is_serving: bool = False
    measurements: Mapping[str, float] = field(default_factory=dict)
    suspect: str = ""
    first_token_note: str = ""
    ran: bool | None = None
    noted_all_reduce: float = math.nan
    tier: str = ""
    trains_adapters: bool = False
    has_experts: bool = False
    reason: str = ""

    @property
    def is_apart(self) -> bool:
        """The case is predicted, but neither fitted nor scored with the others."""
        return self.trains_adapters or self.has_experts

    def measured(self, metric: str) -> float:
        """Return a measured metric; nan where the run states none."""
        return self.measurements.get(metric, math.nan)


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
    inputs, group = inputs_of(data), _group(data, identity)
    tier = one_line(data.get("tier") or "", 40) if isinstance(data.get("tier"), (str, int, float)) else ""
    if is_serving(data):
        return Case(
            id=identity,
            inputs=inputs,
            group=re.split("[-_]", group)[0] or "?",
            is_serving=True,
            measurements=measured_service(data),
            suspect=suspicion(data),
            first_token_note=first_token_note(data),
            ran=True if data.get("measured") else None,
            tier=tier,
        )
    notes = data.get("notes")
    notes = notes[:5000] if isinstance(notes, str) else ""
    text = f"{data.get('id')} {notes}".lower()
    # fine-tuning of all weights is training
    if not states_training(inputs) and re.search(r"(?<![a-z])lora(?![a-z])", text) is not None and "task=sft" not in text:
        inputs["train"] = str(Method.LORA)
    match, measurements = _NOTED_ALL_REDUCE.search(notes), measured_step(data)
    return Case(
        id=identity,
        inputs=inputs,
        group=group,
        measurements=measurements,
        ran=False if data.get("outcome") == "out_of_memory" else True if "step_time" in measurements else None,
        noted_all_reduce=float(match[1]) * 1e9 if match else math.nan,
        tier=tier,
        trains_adapters=trains_adapters(inputs),
        has_experts=has_experts(inputs.get("model")),
    )


def inputs_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the case without the fields that a prediction must not depend on."""
    return {key: value for key, value in data.items() if key not in NOT_INPUTS}


def _group(data: Mapping[str, Any], identity: str) -> str:
    """Return the source of a run: the first word of its id, else of its framework."""
    prefix = identity.split("-")[0].strip().lower()
    if data.get("id") is None:
        prefix = one_line(data.get("framework") or "").split(" ")[0].lower()
    return one_line(prefix, 24) or "?"
