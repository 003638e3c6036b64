"""The smallest single changes with which a service that does not fit would fit; each is verified by a prediction."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any, TypeAlias

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.engine import Engine
from perfmodel.frameworks.engine_formats import formats_on
from perfmodel.hardware.chip import Chip
from perfmodel.hardware.cluster import Cluster
from perfmodel.parallel.serving.plan import ServingLayout
from perfmodel.parallel.serving.prediction import ServingPrediction
from perfmodel.parallel.serving.request import ServingRequest
from perfmodel.workload.quantization import QUANTIZATIONS, Quantization
from perfmodel.workload.serving import Lengths, ServingJob

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
    predict: Callable[[ServingRequest], ServingPrediction],
) -> tuple[Change, ...]:
    """Return up to three single changes that fit, of different kinds, those on the same chips first.

    predict   prediction of a changed request; raises InputError for an invalid one
    """
    layout, memory, usable = prediction.plan.layout, prediction.memory, prediction.memory_usable

    def fitting(changes: Iterable[Change]) -> Iterator[Change]:
        """Yield the changes that fit, with the tp that follows from more chips."""
        for change in changes:
            try:
                changed = predict(replace(asked, **change))
            except InputError:
                continue
            if changed.fits:
                yield {name: changed.plan.to_dict()["tp"] if name == "tp" else value for name, value in change.items()}

    free_memory = usable - (memory["total"] - memory["cache"])
    kinds: list[Iterable[Change]] = []
    if asked.tp is not None and isinstance(layout, ServingLayout):  # else every tp on these chips was tried
        kinds.append({"tp": tp} for tp in _DEGREES if layout.tp < tp <= cluster.num_chips)
    if free_memory > 0.0 or memory["weights"] < usable:
        most = (layout.max_batch if isinstance(layout, ServingLayout) else 0) or engine.scheduling.max_batch
        kinds.append({"max_batch": batch} for batch in _BATCHES if batch < most)
        kinds.append([{"kv_precision": "fp8"}] if str(prediction.job.kv_precision) != "fp8" else [])
    narrower = narrower_formats(engine, cluster.chip, prediction.job.quantization.weight_bytes)
    kinds.append({"quantization": quantization.name} for quantization in narrower)
    if asked.workers is None:  # with the smallest tp that fits
        kinds.append({"chips": chips, "tp": None} for chips in _CHIPS if cluster.num_chips < chips <= cluster.max_chips)
    remedies = list(chain(*(islice(fitting(changes), 1) for changes in kinds)))
    if len(remedies) < MOST_REMEDIES and free_memory > 0.0:
        steps = shortened(prediction.job)
        fits = bisect_left(steps, True, key=lambda change: not any(fitting([change])))
        remedies += steps[max(fits - 1, 0) : fits]
    return tuple(remedies[:MOST_REMEDIES])


def shortened(job: ServingJob) -> list[Change]:
    """Return shorter lengths of the longer of prompt and answer, in steps of 128 tokens, the shortest first."""
    name, lengths = ("input_len", job.input_len) if job.input_len.most >= job.output_len.most else ("output_len", job.output_len)
    return [{name: Lengths(least=min(lengths.least, most), most=most)} for most in range(_LEAST_LENGTH, lengths.most, _LEAST_LENGTH)]


def narrower_formats(engine: Engine, chip: Chip, below: float) -> list[Quantization]:
    """Return formats that the engine runs on the chip, the widest first; formats of equal width in the order of `QUANTIZATIONS`.

    below   bytes of a weight that they need less than
    """
    formats = [QUANTIZATIONS[name] for name in formats_on(engine.kernels.formats, chip)]
    narrower = [quantization for quantization in formats if quantization.weight_bytes < below and not quantization.experts_only]
    return sorted(narrower, key=lambda quantization: -round(4 * quantization.weight_bytes))
