"""Measurements of training runs and of steps of a service: frozen records; those of training are appended to a file of JSON lines."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.foundation.errors import InputError, suggest
from perfmodel.foundation.resources import write_atomically
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.samples import Sample
from perfmodel.parallel.plan import Plan
from perfmodel.parallel.prediction import Prediction
from perfmodel.workload.config import TransformerConfig

MEASUREMENT_VERSION = 1


def interquartile_range(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """Collectives that one rank issued in a step, of one kind on one axis (or product of axes, joined by `+`).

    num_bytes   full buffers, as in the sharding algebra: the gathered tensor of an all-gather, the whole input of a reduce-scatter, the
                local buffer of an all-to-all, the message of a send or a receive
    """

    kind: str
    axis: str
    count: int
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measured run of one plan. Times in seconds, memory in bytes.

    plan_hash         hash of the plan
    chip              name of the chip, from the system
    software          versions by name: python, torch, backend, ...
    device            cpu or cuda
    warmup, steps     warm-up steps, and timed steps
    step_times        of each timed step, on the slowest rank
    step_time         their median
    step_time_spread  their interquartile range
    parts             phases of the slowest rank (medians): forward, backward, optimizer, ... ; and communication by axis as
                      `communication.<axis>`, from a separate instrumented step
    peak_memory       of the fullest rank
    memory_by_rank    peak of every rank
    collectives       collectives of one step, on the rank that issued most of each kind on each axis
    loss              mean loss of the first step, before any update
    gradient_error    largest relative error of a gradient against one process; nan if not checked
    busy_fraction     share of the machine's processors used by other processes; 0 if the system does not report it
    """

    plan: Plan
    plan_hash: str
    chip: str
    software: Mapping[str, str]
    num_ranks: int
    device: str
    warmup: int
    steps: int
    step_times: tuple[float, ...]
    step_time: float
    step_time_spread: float
    parts: Mapping[str, float]
    peak_memory: float
    memory_by_rank: tuple[float, ...]
    collectives: tuple[CollectiveCount, ...]
    loss: float
    gradient_error: float
    busy_fraction: float = 0.0
    schema_version: int = MEASUREMENT_VERSION

    def __post_init__(self) -> None:
        if len(self.step_times) != self.steps or self.steps < 1:
            raise InputError(f"steps={self.steps}: must equal the {len(self.step_times)} step_times; measure again")
        if len(self.memory_by_rank) != self.num_ranks:
            entries = len(self.memory_by_rank)
            raise InputError(f"num_ranks={self.num_ranks}: must equal the {entries} entries of memory_by_rank; measure again")
        if self.plan_hash != self.plan.hash():
            raise InputError(f"plan_hash={self.plan_hash}: is not that of the plan ({self.plan.hash()}); a measurement is never edited")
        object.__setattr__(self, "software", MappingProxyType(dict(self.software)))
        object.__setattr__(self, "parts", MappingProxyType(dict(self.parts)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; nan becomes null."""
        from perfmodel.parallel.plan import plan_to_dict

        data: dict[str, Any] = {"schema_version": self.schema_version}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "plan":
                value = plan_to_dict(value)
            elif entry.name == "collectives":
                value = [{f.name: getattr(record, f.name) for f in fields(record)} for record in value]
            elif isinstance(value, Mapping):
                value = dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, float) and value != value:
                value = None
            data[entry.name] = value
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Prediction and measurement of a plan. Errors are predicted / measured - 1."""

    prediction: Prediction
    measurement: Measurement

    @property
    def time_error(self) -> float:
        return self.prediction.step_time / self.measurement.step_time - 1.0

    @property
    def memory_error(self) -> float:
        return self.prediction.memory["total"] / self.measurement.peak_memory - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMeasurement:
    """Microbenchmarks of one machine: the data of its calibration.

    samples    kernels, collectives and contention
    programs   tiny training programs and the processor time of a step in the busiest rank's main thread [s], for the overhead of the
               host; none where it is fully overlapped
    profile    name of the execution profile of the programs
    busy_fraction   share of the machine's processors used by other processes
    """

    cluster: Cluster
    software: str
    notes: str
    profile: str
    samples: tuple[Sample, ...]
    programs: tuple[tuple[Plan, float], ...]
    busy_fraction: float = 0.0


# --- steps of a service -----------------------------------------------------------------------------------------------

#: Outputs and inputs of the reference products, and their rows: they measure the current speed of the machine as decode (bound by memory)
#: and as prefill (bound by FLOP/s) meet it. Their weights are read from memory.
ANCHOR_WEIGHT, ANCHOR_ROWS = (2816, 1024), {"decode": 8, "prefill": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Shape of a step: `sequences` with `cached` tokens in the cache and `new` tokens each. One new token is decode, more are prefill."""

    sequences: int
    cached: int
    new: int

    def __post_init__(self) -> None:
        for name, least in (("sequences", 1), ("cached", 0), ("new", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)}: must be at least {least}; a step runs new tokens of some sequences")

    @property
    def rows(self) -> int:
        return self.sequences * self.new

    @property
    def is_decode(self) -> bool:
        return self.new == 1

    def __str__(self) -> str:
        return f"{self.sequences} x {self.new} after {self.cached}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Work of one rank in a step, counted by torch.

    flops             of products and attention, with all keys of a sequence for each query, masked or not
    parameter_bytes   of weights, counted at every read                               [byte]
    cache_bytes       of keys and values that attention reads, new ones included, and of recurrent states that are read   [byte]
    written_bytes     of keys and values of new tokens, and of recurrent states that are written                          [byte]
    collectives       by kind, over the ranks of tp
    held_bytes        of weights; held_cache_bytes: of blocks and slots of the cache            [byte]
    peak_memory       largest sum of live tensors                                     [byte]
    """

    flops: float
    parameter_bytes: float
    cache_bytes: float
    written_bytes: float
    collectives: tuple[CollectiveCount, ...]
    held_bytes: float
    held_cache_bytes: float
    peak_memory: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Measured steps of one shape. [s]

    times             of each step, on the slowest rank
    processor_times   CPU time of each step in the computing thread, which other processes do not disturb; of one rank on a CPU, else none
    """

    shape: StepShape
    times: tuple[float, ...]
    counts: StepCounts
    processor_times: tuple[float, ...] = ()

    @cached_property
    def time(self) -> float:
        return statistics.median(self.times)

    @cached_property
    def spread(self) -> float:
        """Interquartile range."""
        return interquartile_range(self.times)

    @cached_property
    def undisturbed(self) -> float:
        """Step time on a quiet machine: processor time if it was measured, else wall time."""
        return statistics.median(self.processor_times or self.times)

    @cached_property
    def undisturbed_spread(self) -> float:
        return interquartile_range(self.processor_times or self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMeasurement:
    """Measured steps of one model on `tp` ranks of this machine.

    dtype           of weights and cache
    logit_error     largest difference from the logits of the uncached forward pass, over the largest logit; nan if not checked
    busy_fraction   share of the machine's processors used by other processes; 0 if the system does not report it
    anchors         time of each reference product of `ANCHOR_ROWS` between the rounds; none where the steps are not predicted [s]
    """

    model: TransformerConfig
    tp: int
    dtype: str
    chip: str
    device: str
    software: Mapping[str, str]
    steps: tuple[MeasuredStep, ...]
    logit_error: float
    busy_fraction: float
    anchors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedComparison:
    """Measured steps with their predictions by the machine's calibration.

    parts   parts of the predicted time of a step by its shape, of which the time is the sum; none for a run that is not predicted (tp > 1)
    drifts  measured over calibrated time of each reference product of `ANCHOR_ROWS`: slowdown of the machine since its calibration
    """

    measurement: ServingMeasurement
    parts: Mapping[StepShape, Mapping[str, float]]
    calibration: str
    drifts: Mapping[str, float] = field(default_factory=dict)

    def predicted(self, step: MeasuredStep) -> float:
        """Return the predicted time of a step. [s]"""
        return sum(self.parts[step.shape].values())

    def error(self, step: MeasuredStep) -> float:
        """Return predicted / measured - 1."""
        return self.predicted(step) / step.undisturbed - 1.0


# --- files of measurements --------------------------------------------------------------------------------------------

_KINDS: dict[str, type] = {
    "plan_hash": str,
    "chip": str,
    "software": dict,
    "num_ranks": int,
    "device": str,
    "warmup": int,
    "steps": int,
    "step_times": list,
    "parts": dict,
    "memory_by_rank": list,
    "collectives": list,
}


#: Fields that older files do not have.
_LATER = {"busy_fraction"}


def measurement_from_dict(data: object, *, where: str = "measurement") -> Measurement:
    """Return the measurement of a file's contents. Raises InputError that names the field."""
    from perfmodel.parallel.plan_file import plan_from_dict

    if not isinstance(data, dict):
        raise InputError(f"{where}: must be a mapping of fields, not {type(data).__name__}; give a file that `perfmodel run` wrote")
    version = data.get("schema_version")
    if version != MEASUREMENT_VERSION:
        raise InputError(f"{where}: schema_version={version!r}: this perfmodel reads version {MEASUREMENT_VERSION}; run the plan again")
    known = {entry.name for entry in fields(Measurement)}
    for key in data:
        if key not in known:
            raise InputError(f"{where}: unknown field {key!r}{suggest(key, known)}")
    for key in known - _LATER:
        if key not in data:
            raise InputError(f"{where}: {key} is missing; run the plan again")
    for key, kind in _KINDS.items():
        if not isinstance(data[key], kind) or isinstance(data[key], bool):
            raise InputError(f"{where}: {key} has the wrong form; run the plan again")
    values = {"busy_fraction": 0.0, **data}
    values["plan"] = plan_from_dict(data["plan"], where=f"{where}: plan")
    try:
        values["collectives"] = tuple(CollectiveCount(**record) for record in data["collectives"])
        for key in ("step_times", "memory_by_rank"):
            values[key] = tuple(float(value) for value in data[key])
        for key in ("software", "parts"):
            values[key] = dict(data[key])
        for key in ("step_time", "step_time_spread", "peak_memory", "loss", "gradient_error", "busy_fraction"):
            values[key] = float("nan") if values[key] is None else float(values[key])
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{where}: a field has the wrong form ({error}); run the plan again") from None
    return Measurement(**values)


def append_measurement(measurement: Measurement, path: str | Path) -> None:
    """Append one line to the file atomically; concurrent writers wait for one another."""
    path = Path(path)
    with _one_writer(path):
        try:
            before = path.read_text(encoding="utf-8") if path.is_file() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read ({error}); choose another path") from None
        if before and not before.endswith("\n"):
            before += "\n"
        write_atomically(path, before + json.dumps(measurement.to_dict(), allow_nan=False) + "\n")


@contextmanager
def _one_writer(path: Path) -> Iterator[None]:
    """Lock the folder, since the file itself is replaced; without a lock on a file system that has none."""
    import fcntl

    try:
        folder = os.open(os.path.dirname(os.path.realpath(path)), os.O_RDONLY)
    except OSError:  # the write reports the fault
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def read_measurements(path: str | Path) -> tuple[Measurement, ...]:
    """Return every measurement in a file, oldest first."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a file that `perfmodel run` wrote") from None
    measurements = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                data = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: is not JSON ({error}); give a file that `perfmodel run` wrote") from None
            measurements.append(measurement_from_dict(data, where=where))
    return tuple(measurements)
