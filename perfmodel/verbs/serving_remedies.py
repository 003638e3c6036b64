"""The smallest single changes with which a service that does not fit would fit; each is verified by a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import Engine
from perfmodel.frameworks.engine_formats import formats_on
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization
from perfmodel.workload.serving import Lengths

Change: TypeAlias = Mapping[str, Any]
"""Fields of a request and their new values."""

MOST_REMEDIES = 3
_DEGREES = (2, 4, 8, 16, 32, 64)
_BATCHES = (512, 256, 128, 64, 32, 16, 8, 4)
_CHIPS = tuple(2**power for power in range(13))
_LEAST_LENGTH = 128


def find_remedies(
    asked: ServingRequest,
    prediction: ServingPrediction,
    *,
    engine: Engine,
    cluster: Cluster,
    fits: Callable[[ServingRequest], ServingPrediction],
) -> tuple[Change, ...]:
    """Return up to three single changes that fit, of different kinds, those on the same chips first.

    fits   prediction of a changed request; raises InputError for an invalid one
    """
    plan, memory, usable = prediction.plan, prediction.memory, prediction.memory_usable
    free_memory = usable - (memory["total"] - memory["cache"])
    kinds: list[Iterable[Change]] = []
    if asked.tp is not None and asked.workers is None:  # else every tp on these chips was tried
        kinds.append({"tp": tp} for tp in _DEGREES if plan.tp < tp <= cluster.num_chips)
    if free_memory > 0.0 or memory["weights"] < usable:
        most = plan.max_batch or engine.scheduling.max_batch
        kinds.append({"max_batch": batch} for batch in _BATCHES if batch < most)
        kinds.append([{"kv_precision": "fp8"}] if str(prediction.job.kv_precision) != "fp8" else [])
    narrower = narrower_formats(engine, cluster.chip, prediction.job.quantization.weight_bytes)
    kinds.append({"quantization": quantization.name} for quantization in narrower)
    if asked.workers is None:  # with the smallest tp that fits
        kinds.append({"chips": chips, "tp": None} for chips in _CHIPS if cluster.num_chips < chips <= cluster.max_chips)
    remedies: list[Change] = []
    for changes in kinds:
        fitting = (change for change in (_tried(asked, change, fits) for change in changes) if change is not None)
        remedies += islice(fitting, 1)
    if len(remedies) < MOST_REMEDIES and free_memory > 0.0:
        shorter = _shorter(asked, prediction, fits)
        remedies += [shorter] if shorter is not None else []
    return tuple(remedies[:MOST_REMEDIES])


def _tried(asked: ServingRequest, change: Change, fits: Callable[[ServingRequest], ServingPrediction]) -> Change | None:
    """Return the change if it fits, with the tp that follows from more chips; else None."""
    try:
        prediction = fits(replace(asked, **change))
    except InputError:
        return None
    if not prediction.fits:
        return None
    return {name: prediction.plan.tp if name == "tp" else value for name, value in change.items()}


def narrower_formats(engine: Engine, chip: Chip, below: float) -> list[Quantization]:
    """Return formats that the engine runs on the chip, the widest first; formats of equal width in the order of `QUANTIZATIONS`.

    below   bytes of a weight that they need less than
    """
    formats = [QUANTIZATIONS[name] for name in formats_on(engine.kernels.formats, chip)]
    narrower = [quantization for quantization in formats if quantization.weight_bytes < below and not quantization.experts_only]
    return sorted(narrower, key=lambda quantization: -round(4 * quantization.weight_bytes))


def _shorter(asked: ServingRequest, prediction: ServingPrediction, fits: Callable[[ServingRequest], ServingPrediction]) -> Change | None:
    """Return the longer of prompt and answer, shortened in steps of 128 tokens until it fits."""
    job = prediction.job
    name, lengths = ("input_len", job.input_len) if job.input_len.most >= job.output_len.most else ("output_len", job.output_len)

    def change(most: int) -> Change:
        return {name: Lengths(least=min(lengths.least, most), most=most)}

    low, high = 0, -(-lengths.most // _LEAST_LENGTH)  # in steps: fits (or nothing), does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _tried(asked, change(middle * _LEAST_LENGTH), fits) else (low, middle)
    return change(low * _LEAST_LENGTH) if low else None
