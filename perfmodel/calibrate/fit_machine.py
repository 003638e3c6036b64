"""Fits a calibration to microbenchmarks of one machine (`perfmodel.hardware.samples`): a pure function, no torch.

Every part is linear in its parameters, so a few dozen samples are enough and the fit is stable: no tiles and no waves, one cache level
after another, an additive floor. Kernel classes and collectives without samples are omitted, and the cost model falls back as for any
calibration.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeVar

import numpy as np

from perfmodel.calibrate.fits import NUM_FOLDS, Array, Indices, fit_linear, held_out_errors, relative_errors, rounded
from perfmodel.cost.link_rates import RING_PASSES
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.foundation.errors import InputError
from perfmodel.foundation.grouping import grouped
from perfmodel.hardware.calibration import (
    RAMP_BYTES,
    SCALE_UP,
    VECTOR_BANDWIDTH,
    WEIGHT_BANDWIDTH,
    AttentionModel,
    Calibration,
    CalibrationFit,
    CollectiveModel,
    ConvolutionModel,
    DecodeAttentionModel,
    HostTimes,
    KernelClass,
    KernelModels,
    MatmulModel,
    StreamingModel,
)
from perfmodel.hardware.samples import (
    AttentionSample,
    CollectiveSample,
    ContentionSample,
    ConvolutionSample,
    DecodeSample,
    HostSample,
    MatmulSample,
    Sample,
    StreamingSample,
    WeightSample,
)

LAUNCH = "launch"
"""Name of the host sample that becomes `launch_time`."""

CACHE_STEPS = tuple(2.0**exponent for exponent in range(15, 31))
"""Candidate cache capacities: working sets of 32 KiB to 1 GiB."""

MAX_CACHES = 2
MOST_OF_PEAK = 1.2
"""Largest ratio of a fitted rate to its peak: a `MatmulModel` accepts at most 1.25."""

Item = TypeVar("Item")


@dataclass(slots=True)
class _Record:
    """Points and held-out errors of the parts fitted so far."""

    points: dict[str, int] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, columns: Array, time: Array) -> Array:
        """Fit `columns`, record the error on held-out points, and return the coefficients."""

        def refit(chosen: Indices) -> Callable[[Indices], Array]:
            coefficients = fit_linear(columns[chosen], time[chosen])
            return lambda rows: np.asarray(columns[rows] @ coefficients)

        coefficients = fit_linear(columns, time)
        enough = len(time) > columns.shape[1] + NUM_FOLDS
        errors = held_out_errors(np.arange(len(time)), time, refit) if enough else relative_errors(columns @ coefficients, time)
        self.points[part] = len(time)
        self.errors[part] = round(float(np.median(errors)), 4)
        return coefficients


def fit_machine(
    samples: Sequence[Sample], *, name: str, chip: str, software: str, source: str = "perfmodel calibrate, microbenchmarks of this machine"
) -> Calibration:
    """Return the calibration that the samples support.

    name, chip, software   as in `Calibration`; chip is the name of the measured chip
    """
    if any(not np.isfinite(_time_of(sample)) or _time_of(sample) <= 0 for sample in samples):
        raise InputError("samples: a time is not a positive number; measure again")
    record = _Record()
    peaks: dict[str, float] = {}
    bandwidth, streaming = _fit_streaming(_of(samples, StreamingSample), record)
    if bandwidth > 0:
        peaks["memory_bandwidth"] = bandwidth
    matmul = {}
    for dtype, products in grouped(_of(samples, MatmulSample), lambda sample: sample.dtype).items():
        peaks[f"flop_rate.{dtype}"], matmul[Dtype(dtype)] = _fit_matmul(products, dtype, peaks, record)
    convolution = {
        Dtype(dtype): _fit_convolution(group, dtype, peaks, record)
        for dtype, group in grouped(_of(samples, ConvolutionSample), lambda sample: sample.dtype).items()
    }
    attention = _fit_attention(_of(samples, AttentionSample), peaks, record)
    peaks |= _fit_weights(_of(samples, WeightSample), peaks, record)
    decoding = _fit_decoding(_of(samples, DecodeSample), peaks, record)
    link, collectives = _fit_collectives(_of(samples, CollectiveSample), record)
    tiers = {SCALE_UP: collectives} if collectives else {}
    if link > 0:
        peaks[f"{SCALE_UP}_bandwidth"] = link
    host_times = {name: _median(sample.time for sample in group) for name, group in _by_name(_of(samples, HostSample)).items()}
    contention = {name: _median(sample.factor for sample in group) for name, group in _by_name(_of(samples, ContentionSample)).items()}
    return Calibration(
        name=name,
        chips=(chip,),
        software=software,
        source=source,
        date=datetime.date.today().isoformat(),
        kernels=KernelModels(
            matmul=matmul, convolution=convolution, streaming=streaming, attention=attention, decode_attention=decoding, collectives=tiers
        ),
        peaks=peaks,
        host=HostTimes(launch_time=host_times.pop(LAUNCH, 0.0), host_times=host_times),
        contention=contention,
        fit=CalibrationFit(points=record.points, errors=record.errors),
    )


def _time_of(sample: Sample) -> float:
    return sample.factor if isinstance(sample, ContentionSample) else sample.time


def _of(samples: Iterable[Sample], kind: type[Item]) -> list[Item]:
    return [sample for sample in samples if isinstance(sample, kind)]


def _by_name(samples: Iterable[Item]) -> dict[str, list[Item]]:
    return grouped(samples, lambda sample: sample.name)  # type: ignore[attr-defined]  # host and contention samples have one


def _median(values: Iterable[float]) -> float:
    return rounded(float(np.median(list(values))))


def _array(values: Iterable[float]) -> Array:
    return np.array(list(values), dtype=float)


def _inverse(coefficient: float, most: float) -> float:
    """Return 1 / coefficient, at most `most` if the coefficient vanished."""
    return float(min(1.0 / coefficient, most)) if coefficient > 1.0 / most else most


def _fit_products(
    samples: Sequence[MatmulSample] | Sequence[ConvolutionSample], num_bytes: Array, part: str, record: _Record
) -> tuple[float, float, float, float, float]:
    """Fit t = t0 + 2 b m n (k + k0) / R + bytes / B.

    Return t0 [s], R [FLOP/s], the best observed rate [FLOP/s], k0, and 1 / B [s/byte].
    """
    m, n, k, batch, time = (_array(getattr(sample, name) for sample in samples) for name in ("m", "n", "k", "batch", "time"))
    flops = 2 * batch * m * n * k
    columns = np.stack([np.ones_like(time), flops, 2 * batch * m * n, num_bytes], axis=1)
    if len(time) < columns.shape[1]:
        columns[:, [0, 2, 3]] = 0.0
    floor_time, per_flop, per_start, per_byte = record.add(part, columns, time)
    fastest = float((flops / time).max())
    rate = _inverse(per_flop, 2.0 * fastest)
    return floor_time, rate, fastest, per_start * rate, per_byte


def _fit_matmul(samples: Sequence[MatmulSample], dtype: str, peaks: dict[str, float], record: _Record) -> tuple[float, MatmulModel]:
    """Fit the peak rate [FLOP/s] and the model. The peak is the best observed rate, or slightly below R if every observed rate includes
    overhead (on a busy machine)."""
    m, n, k, batch, time = (_array(getattr(sample, name) for sample in samples) for name in ("m", "n", "k", "batch", "time"))
    num_bytes = batch * (m * k + k * n + m * n) * itemsize(Dtype(dtype))
    floor_time, rate, fastest, depth_offset, per_byte = _fit_products(samples, num_bytes, f"matmul.{dtype}", record)
    peak = max(fastest, rate / MOST_OF_PEAK)
    memory = peaks.get("memory_bandwidth", 0.0) or _inverse(per_byte, num_bytes.max() / time.min())
    peaks.setdefault("memory_bandwidth", memory)
    return rounded(peak, 6), MatmulModel(
        peak_fraction=rounded(rate / peak),
        depth_offset=rounded(depth_offset),
        memory_fraction=rounded(_inverse(per_byte, 1e6 * memory) / memory),
        floor_time=rounded(floor_time),
        sharpness=1.0,
    )


def _fit_convolution(samples: Sequence[ConvolutionSample], dtype: str, peaks: dict[str, float], record: _Record) -> ConvolutionModel:
    """Fit the model, all three passes together."""
    num_bytes, time = (_array(getattr(sample, name) for sample in samples) for name in ("num_bytes", "time"))
    floor_time, rate, fastest, depth_offset, per_byte = _fit_products(samples, num_bytes, f"convolution.{dtype}", record)
    peak = peaks.setdefault(f"flop_rate.{dtype}", rounded(fastest, 6))
    memory = peaks.setdefault("memory_bandwidth", rounded(float((num_bytes / time).max()), 6))
    return ConvolutionModel(
        peak_fraction=rounded(rate / peak),
        depth_offset=rounded(depth_offset),
        memory_fraction=rounded(_inverse(per_byte, 1e6 * memory) / memory),
        floor_time=rounded(floor_time),
    )


def _fit_streaming(samples: Sequence[StreamingSample], record: _Record) -> tuple[float, dict[KernelClass, StreamingModel]]:
    """Fit the memory bandwidth [byte/s] and the models.

    The default class gives the curve from cache to memory. Other classes scale that curve and add a time per element, if their samples
    support it.
    """
    by_class = grouped(samples, lambda sample: sample.kernel_class)
    if not by_class:
        return 0.0, {}
    plain = by_class.get(KernelClass.DEFAULT) or max(by_class.values(), key=len)
    floor_time, inverse, caches = _fit_caches(plain, record)
    memory = 1.0 / (inverse + sum(step for _, step in caches))
    levels, slower = [], inverse
    for capacity, step in caches:
        levels.append((rounded(capacity), rounded(1.0 / slower / memory)))
        slower += step
    default = StreamingModel(bandwidth_fraction=1.0, floor_time=rounded(floor_time), caches=tuple(levels))
    models = {KernelClass.DEFAULT: default}
    for kernel, of_class in by_class.items():
        if KernelClass(kernel) is not KernelClass.DEFAULT:
            group = [sample for sample in of_class if not sample.is_backward] or of_class

            def columns(samples: Sequence[StreamingSample]) -> tuple[Array, Array]:
                num_bytes, elements, time = _stream_arrays(samples)
                curve = num_bytes * (inverse + sum(step * _step(num_bytes / capacity) for capacity, step in caches))
                return np.stack([np.ones_like(time), curve, elements], axis=1), time

            matrix, time = columns(group)
            floor, scale, element_time = record.add(f"streaming.{kernel}", matrix, time)
            scale = max(scale, LEAST_CURVE)
            backward_factor = 1.0
            if len(group) < len(of_class):
                matrix, time = columns([sample for sample in of_class if sample.is_backward])
                # large kernels weigh most: small ones are dominated by the host
                backward_factor = rounded(float(time.sum() / (matrix @ np.array([floor, scale, element_time])).sum()))
            models[KernelClass(kernel)] = StreamingModel(
                bandwidth_fraction=rounded(1.0 / scale),
                floor_time=rounded(floor),
                element_time=rounded(element_time),
                caches=tuple((capacity, rounded(fraction / scale)) for capacity, fraction in levels),
                backward_factor=backward_factor,
            )
    return rounded(memory, 6), models


LEAST_CURVE = 0.01
"""Least share of the default bandwidth curve in a compute-bound class: its memory traffic is overlapped, but not free."""


def _stream_arrays(samples: Sequence[StreamingSample]) -> tuple[Array, Array, Array]:
    num_bytes, elements, time = (_array(getattr(sample, name) for sample in samples) for name in ("num_bytes", "num_elements", "time"))
    return num_bytes, elements, time


def _step(x: Array) -> Array:
    """Return the smooth step of `streaming_time`."""
    return x * x / (1.0 + x * x)


def _fit_caches(samples: Sequence[StreamingSample], record: _Record) -> tuple[float, float, list[tuple[float, float]]]:
    """Fit the floor [s], the [s/byte] of the innermost level and, for each cache, its capacity and the [s/byte] beyond it.

    The best of all choices of capacities. Another cache is accepted only if it lowers the squared relative error by a fifth.
    """
    num_bytes, _, time = _stream_arrays(samples)

    def columns(capacities: Sequence[float]) -> Array:
        steps = [num_bytes * _step(num_bytes / capacity) for capacity in capacities]
        return np.stack([np.ones_like(time), num_bytes, *steps], axis=1)

    def loss(capacities: Sequence[float]) -> float:
        matrix = columns(capacities)
        return float(np.square(matrix @ fit_linear(matrix, time) / time - 1.0).sum())

    chosen: tuple[float, ...] = ()
    least = loss(())
    inside = [capacity for capacity in CACHE_STEPS if num_bytes.min() < capacity < num_bytes.max()]
    for number in range(1, MAX_CACHES + 1):
        if len(time) > number + 3:
            best = min(combinations(inside, number), key=loss, default=())
            if best and loss(best) < 0.8 * least:
                chosen, least = best, loss(best)
    floor_time, inverse, *steps = record.add(f"streaming.{KernelClass.DEFAULT}", columns(chosen), time)
    fastest = max(inverse, 1.0 / (100.0 * float((num_bytes / time).max())))
    caches = [(capacity, step) for capacity, step in zip(chosen, steps, strict=True) if step > 0]
    return float(floor_time), float(fastest), caches


def _fit_attention(samples: Sequence[AttentionSample], peaks: dict[str, float], record: _Record) -> dict[str, AttentionModel]:
    """Fit t = t0 + 4 b h q f (z (d + d0) + s1) / R + bytes / B; the backward rate is the median over the samples."""
    names = ("batch", "heads", "kv_heads", "query_length", "key_length", "head_dim", "causal_fraction", "time", "backward_time")
    models: dict[str, AttentionModel] = {}
    for kernel, of_kernel in grouped(samples, lambda sample: sample.kernel).items():
        by_dtype = grouped(of_kernel, lambda sample: sample.dtype)
        for dtype, group in by_dtype.items():
            b, h, g, q, z, d, f, time, backward_time = (_array(getattr(sample, name) for sample in group) for name in names)
            queries = 4 * b * h * q * f
            num_bytes = itemsize(Dtype(dtype)) * b * d * 2 * (h * q + g * z)
            columns = np.stack([np.ones_like(time), queries * z * d, queries * z, queries, num_bytes], axis=1)
            if len(np.unique(d)) < 2:
                columns[:, 2] = 0.0
            if len(time) <= columns.shape[1]:
                columns[:, [2, 3, 4]] = 0.0
            floor_time, per_flop, per_score, per_query, per_byte = record.add(f"attention.{kernel}.{dtype}", columns, time)
            rate = _inverse(per_flop, 2.0 * float((queries * z * d / time).max()))
            peak = peaks.setdefault(f"flop_rate.{dtype}", rounded(rate, 6))
            memory = peaks.setdefault("memory_bandwidth", rounded(float((num_bytes / time).max()), 6))
            compute = columns[:, 1:4] @ np.array([per_flop, per_score, per_query])
            left = backward_time - floor_time - 2.0 * num_bytes * per_byte
            model = AttentionModel(
                peak_fraction=rounded(rate / peak),
                head_dim_offset=rounded(per_score * rate),
                sequence_offset=rounded(per_query * rate),
                floor_time=rounded(floor_time),
                query_tile=1.0,
                memory_fraction=rounded(_inverse(per_byte, 1e6 * memory) / memory),
            )
            if len(ratios := model.backward_flops * compute[left > 0] / left[left > 0]):
                model = replace(model, backward_rate=rounded(float(np.median(ratios))))
            models[f"{kernel}.{dtype}"] = model
        largest = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]))
        models[kernel] = models[f"{kernel}.{largest}"]
    return models


def _fit_weights(samples: Sequence[WeightSample], peaks: Mapping[str, float], record: _Record) -> dict[str, float]:
    """Fit the bandwidth of weights from memory: of a matrix-vector product, and t - 2 m n k / R = V / B of a few rows."""
    bandwidths = {}
    for name, is_vector in ((VECTOR_BANDWIDTH, True), (WEIGHT_BANDWIDTH, False)):
        chosen = [sample for sample in samples if (sample.rows == 1) == is_vector]
        if chosen:
            rows, elements, time = (
                _array(values) for values in zip(*((s.rows, s.outputs * s.inputs, s.time) for s in chosen), strict=True)
            )
            rates = _array(peaks.get(f"flop_rate.{sample.dtype}", np.inf) for sample in chosen)
            computed = 0.0 if is_vector else 2.0 * rows * elements / rates
            num_bytes = elements * _array(itemsize(sample.dtype) for sample in chosen)
            per_byte = float(np.median((time - computed) / num_bytes))
            if per_byte > 0:
                bandwidths[name] = rounded(1.0 / per_byte, 6)
                record.points[name] = len(chosen)
                record.errors[name] = round(float(np.median(relative_errors(computed + num_bytes * per_byte, time))), 4)
    return bandwidths


def _fit_decoding(samples: Sequence[DecodeSample], peaks: dict[str, float], record: _Record) -> dict[str, DecodeAttentionModel]:
    """Fit t = t0 + V / B, V the bytes of the cache, of queries and of outputs."""
    if not samples:
        return {}
    names = ("batch", "heads", "kv_heads", "key_length", "head_dim", "time")
    b, h, g, z, d, time = (_array(getattr(sample, name) for sample in samples) for name in names)
    num_bytes = _array(itemsize(sample.dtype) for sample in samples) * 2 * b * d * (g * z + h)
    floor_time, per_byte = record.add("decode_attention", np.stack([np.ones_like(time), num_bytes], axis=1), time)
    memory = peaks.setdefault("memory_bandwidth", rounded(float((num_bytes / time).max()), 6))
    share = min(_inverse(per_byte, float((num_bytes / time).max())) / memory, 1.0)
    return {"flash": DecodeAttentionModel(memory_fraction=rounded(share), floor_time=rounded(floor_time))}


def _fit_collectives(samples: Sequence[CollectiveSample], record: _Record) -> tuple[float, dict[CollectiveKind, CollectiveModel]]:
    """Fit the link bandwidth [byte/s] (the best of all kinds) and the models: t = a + a1 (n - 1) + wire / B + c sqrt(wire)."""
    fitted = {}
    for name, group in grouped((sample for sample in samples if sample.group_size > 1), lambda sample: sample.kind).items():
        kind = CollectiveKind(name)
        num_bytes, ranks, time = (_array(getattr(sample, column) for sample in group) for column in ("num_bytes", "group_size", "time"))
        wire = RING_PASSES[kind] * num_bytes * (ranks - 1) / ranks
        columns = np.stack([np.ones_like(time), ranks - 1, wire, np.sqrt(wire / RAMP_BYTES)], axis=1)
        if len(np.unique(ranks)) < 2:
            columns[:, 1] = 0.0
        num_sizes = len(np.unique(num_bytes))
        if num_sizes < LEAST_RAMP_SIZES:
            columns[:, 3] = 0.0
        if num_sizes < 2:
            columns[:, 0] = 0.0
        base_time, hop_time, per_byte, ramp_time = record.add(f"{SCALE_UP}.{kind}", columns, time)
        fitted[kind] = base_time, hop_time, _inverse(per_byte, float((wire / time).max()) * 10.0), ramp_time
    if not fitted:
        return 0.0, {}
    link = rounded(max(bandwidth for _, _, bandwidth, _ in fitted.values()), 6)
    return link, {
        kind: CollectiveModel(
            base_time=rounded(base_time),
            hop_time=rounded(hop_time),
            bandwidth_fraction=rounded(bandwidth / link),
            ramp_time=rounded(ramp_time),
        )
        for kind, (base_time, hop_time, bandwidth, ramp_time) in fitted.items()
    }


LEAST_RAMP_SIZES = 6
"""Least number of message sizes from which a ramp differs from noise."""
