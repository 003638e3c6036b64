"""The smallest single changes with which a service that does not fit would fit; each is verified by a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import Engine
from perfmodel.frameworks.engine_formats import formats_on
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.workload.quantization import QUANTIZATIONS
from perfmodel.workload.serving import Lengths

Change: TypeAlias = Mapping[str, Any]
"""Fields of a request and their new values."""

MOST_REMEDIES = 3
_DEGREES = (2, 4, 8, 16, 32, 64)
_BATCHES = (512, 256, 128, 64, 32, 16, 8, 4)
_MOST_CHIPS = 4096
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
    free_memory = prediction.memory_usable - (prediction.memory["total"] - prediction.memory["cache"])
    kinds = [_more_tp(asked, prediction, cluster)]
    if free_memory > 0.0 or prediction.memory["weights"] < prediction.memory_usable:
        kinds += [_fewer_sequences(prediction, engine), _narrower_cache(prediction)]
    kinds += [_narrower_weights(prediction, engine, cluster), _more_chips(asked, cluster)]
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


def _more_tp(asked: ServingRequest, prediction: ServingPrediction, cluster: Cluster) -> Iterator[Change]:
    if asked.tp is None or asked.workers is not None:  # else every tp on these chips was tried
        return
    for tp in _DEGREES:
        if prediction.plan.tp < tp <= cluster.num_chips:
            yield {"tp": tp}


def _fewer_sequences(prediction: ServingPrediction, engine: Engine) -> Iterator[Change]:
    most = prediction.plan.max_batch or engine.scheduling.max_batch
    yield from ({"max_batch": batch} for batch in _BATCHES if batch < most)


def _narrower_cache(prediction: ServingPrediction) -> Iterator[Change]:
    if str(prediction.job.kv_precision) != "fp8":
        yield {"kv_precision": "fp8"}


def _narrower_weights(prediction: ServingPrediction, engine: Engine, cluster: Cluster) -> Iterator[Change]:
    """Yield formats that the engine runs on the chip, the widest first; formats of equal width in the order of `QUANTIZATIONS`."""
    least = prediction.job.quantization.weight_bytes
    narrower = [QUANTIZATIONS[name] for name in formats_on(engine.kernels.formats, cluster.chip)]
    for quantization in sorted(narrower, key=lambda quantization: -round(4 * quantization.weight_bytes)):
        if quantization.weight_bytes < least and not quantization.experts_only:
            yield {"quantization": quantization.name}


def _more_chips(asked: ServingRequest, cluster: Cluster) -> Iterator[Change]:
    """Yield numbers of chips in powers of two, with the smallest tp that fits."""
    if asked.workers is not None:
        return
    chips = 1
    while chips <= min(cluster.max_chips, _MOST_CHIPS):
        if chips > cluster.num_chips:
            yield {"chips": chips, "tp": None}
        chips *= 2


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
