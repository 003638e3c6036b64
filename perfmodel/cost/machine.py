"""A cluster and a calibration resolved for one dtype: every number that the formulas of `cost/` need, as floats and small arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.link_rates import NEVER, LinkRates, channels_of, link_rates, tier_kind, tier_models
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import (
    GROUPED_TILE,
    NO_TILES,
    SPEC_SHEET,
    WIDENED_TILE,
    AttentionModel,
    Calibration,
    DecodeAttentionModel,
    GroupedMatmulModel,
    KernelClass,
    MatmulModel,
    Provenance,
    StreamingModel,
)
from perfmodel.hardware.chip import HOST_BANDWIDTH
from perfmodel.hardware.serving_kernels import ServingKernels

if TYPE_CHECKING:
    from perfmodel.hardware.chip import Chip
    from perfmodel.hardware.cluster import Cluster

Array = NDArray[np.float64]

MEBIBYTE = 2.0**20
"""Unit of the host times that are counted by bytes, such as `gather_mebibyte`."""

HOST_MEMORY_BANDWIDTH = 50e9
"""Host-memory throughput of an optimizer on the host, for all chips of the host together. [byte/s] Source: 10 s a step where 72e9
parameters of 28 byte lie on four nodes (deepspeedai/DeepSpeed issue 6834, of 2024); about 2 s of 2.4 where 3.1e9 lie on one (pull request
7474, of 2025).
"""

_UNMEASURED_DECODE_FLOOR = 11e-6
"""Floor of decode attention without measurements: fits to aiconfigurator's tables of H100, H200 and B200 (A100: 18 us). [s]"""

# For a dtype without a model of its own: dtypes with the nearest fractions of peak, in order.
_NEAREST_DTYPE: Mapping[Dtype, tuple[Dtype, ...]] = MappingProxyType(
    {
        Dtype.BF16: (Dtype.FP16, Dtype.FP32, Dtype.TF32),
        Dtype.FP16: (Dtype.BF16, Dtype.FP32, Dtype.TF32),
        Dtype.TF32: (Dtype.FP32, Dtype.BF16, Dtype.FP16),
        Dtype.FP32: (Dtype.TF32, Dtype.BF16, Dtype.FP16),
        Dtype.FP64: (Dtype.FP32, Dtype.BF16, Dtype.FP16),
        Dtype.FP8: (Dtype.INT8, Dtype.BF16, Dtype.FP16),
        Dtype.INT8: (Dtype.FP8, Dtype.BF16, Dtype.FP16),
        Dtype.FP4: (Dtype.FP8, Dtype.BF16, Dtype.FP16),
    }
)

# For a class of kernels without measurements: another class of similar cost, tried before the default.
_NEAREST_KERNEL: Mapping[KernelClass, KernelClass] = MappingProxyType(
    {KernelClass.GELU_TANH: KernelClass.GELU, KernelClass.SILU: KernelClass.GELU, KernelClass.RMSNORM: KernelClass.LAYERNORM}
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatmulRates:
    """`MatmulModel` in SI units. tiles: (1 / rows, 1 / columns, output elements x penalty) of each; tile_columns: [3, tiles].

    fills_units: a product with fewer tiles than compute units is no slower, except for the last wave
    """

    flop_rate: float
    depth_offset: float
    wave_softness: float
    compute_units: float
    bandwidth: float
    floor_time: float
    sharpness: float
    least_waves: float
    inverse_least_waves: float
    inverse_split_depth: float
    few_rows: float
    fills_units: bool
    tiles: tuple[tuple[float, float, float], ...]
    tile_columns: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRates:
    """`ConvolutionModel` in SI units."""

    flop_rate: float
    depth_offset: float
    bandwidth: float
    floor_time: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamingRates:
    """Tables by kernel code; for columns of machines also by machine.

    table       floor [s], [s/byte] innermost, [s/element]
    caches      for each, (1 / capacity, extra [s/byte] beyond)
    backward    factor of backward kernels; has_backward: some are not 1
    """

    table: Array
    caches: tuple[Array, ...]
    backward: Array
    has_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """`AttentionModel` in SI units. long: rates over many keys, forward and backward, for heads of 128 entries; None: as over few keys."""

    model: AttentionModel
    flop_rate: float
    compute_units: float
    bandwidth: float
    floor_time: float
    long: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedMatmulRates:
    """`GroupedMatmulModel` in SI units. matmul: plain products at the grouped kernel's rates, with its small tile, without a floor."""

    matmul: MatmulRates
    row_bandwidth: float
    expert_time: float
    floor_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionRates:
    """`DecodeAttentionModel` in SI units."""

    bandwidth: float
    floor_time: float
    ramp_time: float
    inverse_ramp_bytes: float
    unit_time: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingRates:
    """Rates of kernels that only serving runs.

    kernels           measured ones, and typical ones where there is no measurement
    decode_attention  by kernel
    relative_rate     by compute dtype, the chip's FLOP rate at its clock over that of 16 bits; a dtype without units is missing
    exposed_floor     exposed share of a kernel's floor
    peak_flop_rate    in 16 bits, at the clock of attention     [FLOP/s]
    widened           of products in 16 bits, with the additional tile of kernels that widen weights
    """

    kernels: ServingKernels
    decode_attention: Mapping[str, DecodeAttentionRates]
    relative_rate: Mapping[Dtype, float]
    exposed_floor: float
    peak_flop_rate: float
    widened: MatmulRates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChipMemory:
    """Memory of a chip, and what the runtime allocates of it. [byte]

    bandwidth            of the data sheet or as measured   [byte/s]
    capacity, usable     as the driver reports it, and the part that the runtime can use
    context_bytes        of the runtime's context
    communicator_bytes   buffers of a communicator whose ranks share a domain of each tier
    allocator_factor     ratio of reserved to allocated bytes   [-]
    """

    bandwidth: float
    capacity: float
    usable: float
    context_bytes: float
    communicator_bytes: tuple[float, ...]
    allocator_factor: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostRates:
    """Host of a chip: its times, and the rates of its memory.

    launch_time        of a kernel   [s]
    times              by event      [s]
    is_chip            the host computes the step itself
    bandwidth          of a chip's link to its host's memory                  [byte/s]
    memory_bandwidth   a chip's share of the bandwidth of the host's memory   [byte/s]
    """

    launch_time: float
    times: Mapping[str, float]
    is_chip: bool = False
    bandwidth: float = HOST_BANDWIDTH
    memory_bandwidth: float = HOST_MEMORY_BANDWIDTH


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionGenerations:
    """Generations of fused-attention kernels, by name.

    generations   rate over that of the measured generation                     [-]
    long          rates over long sequences, forward and backward               [FLOP/s]
    """

    generations: Mapping[str, float]
    long: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Basis:
    """Basis of a machine's rates.

    calibration   its name
    parts         of matmul, streaming, attention and the present kinds of tier (scale_up, scale_out): `spec sheet`, `prior: NAME`,
                  `partial calibration: NAME` or `calibrated: NAME`
    errors        held-out median errors of the calibration, by part
    """

    calibration: str
    parts: Mapping[str, str]
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """Rates of the hardware and its software for one compute dtype, made by `resolve_machine`.

    convolution: None: a convolution takes as long as a matrix multiply of its size.
    grouped_matmul: rates of a layer's fused experts.
    serving: kernels of serving only; no cost of a training step uses them.
    low: the machine for products in fewer bits, if the job has a recipe for them.
    row_multiple: rows of each of several grouped products are padded to a multiple of it.
    """

    cluster: str
    chip: str
    dtype: Dtype
    peak_flop_rate: float
    compute_units: float
    tier_sizes: tuple[int, ...]
    matmul: MatmulRates
    streaming: StreamingRates
    attention: Mapping[str, AttentionRates]
    fused_attention: AttentionGenerations
    grouped_matmul: GroupedMatmulRates
    links: LinkRates
    memory: ChipMemory
    host: HostRates
    contention: Mapping[str, float]
    basis: Basis
    serving: ServingRates
    convolution: ConvolutionRates | None = None
    low: Machine | None = None
    row_multiple: float = 1.0


def resolve_machine(cluster: Cluster, calibration: Calibration = SPEC_SHEET, dtype: Dtype = Dtype.BF16) -> Machine:
    """Return the machine of `cluster` with the rates of `calibration`, computing in `dtype`."""
    chip = cluster.chip
    peak = calibration.peaks.get(f"flop_rate.{dtype}", 0.0) or chip.flop_rate(dtype)
    memory_bandwidth = calibration.peaks.get("memory_bandwidth", chip.memory.bandwidth)
    memory_capacity = calibration.peaks.get("memory_capacity", chip.memory.capacity)
    units = float(max(chip.units.compute_units, 1))
    models, sustained = calibration.kernels, calibration.sustained
    clock = sustained.clock(dtype)

    slowdown = partial(contention_factor, calibration.contention, num_processes=cluster.num_chips)
    exposed_floor = sustained.exposed_floor_fraction

    rests_on = {part: _label(calibration, chip, part, getattr(models, part)) for part in ("matmul", "streaming", "attention")}
    matmul_model, is_own = _nearest_matmul(models.matmul or SPEC_SHEET.kernels.matmul, dtype)
    if not is_own and calibration.provenance is Provenance.CALIBRATED and models.matmul:
        rests_on["matmul"] = f"{Provenance.PRIOR}: {calibration.name}"
    floor_time = matmul_model.floor_time * exposed_floor
    matmul, widened = (
        _matmul_rates(model, peak * clock, memory_bandwidth, units, floor_time, slowdown("matmul"))
        for model in (matmul_model, _with_tile(matmul_model, WIDENED_TILE))
    )

    streaming_models = models.streaming or SPEC_SHEET.kernels.streaming
    streaming = _streaming_rates(streaming_models, memory_bandwidth, exposed_floor, slowdown("streaming"))

    attention_models = models.attention or SPEC_SHEET.kernels.attention
    kernels = {name: model for name, model in attention_models.items() if "." not in name}
    for name, model in attention_models.items():
        if name.endswith(f".{dtype}"):  # `flash.bf16` replaces `flash` in bf16
            kernels[name.removesuffix(f".{dtype}")] = model
    attention = {
        name: AttentionRates(
            model=model,
            flop_rate=peak * sustained.attention_clock_fraction * model.peak_fraction / slowdown("attention"),
            compute_units=units,
            bandwidth=memory_bandwidth * model.memory_fraction / slowdown("attention"),
            floor_time=model.floor_time * exposed_floor * slowdown("attention"),
        )
        for name, model in kernels.items()
    }

    convolution: ConvolutionRates | None = None
    if (of_convolution := models.convolution.get(dtype)) is not None:
        convolution = ConvolutionRates(
            flop_rate=peak * sustained.sustained_clock_fraction * of_convolution.peak_fraction / slowdown("matmul"),
            depth_offset=of_convolution.depth_offset,
            bandwidth=memory_bandwidth * of_convolution.memory_fraction / slowdown("matmul"),
            floor_time=of_convolution.floor_time * exposed_floor * slowdown("matmul"),
        )

    sharing = slowdown("host")
    tier_sizes, communicator_bytes = [], []
    for tier in cluster.tiers:
        tier_sizes.append(tier.size)
        communicator_bytes.append(channels_of(tier.link.bandwidth) * calibration.memory.channel_bytes)
        kind = tier_kind(cluster, tier)
        rests_on[kind] = _label(calibration, chip, kind, tier_models(cluster, tier, calibration))
    return Machine(
        cluster=cluster.name,
        chip=chip.name,
        dtype=dtype,
        peak_flop_rate=peak,
        compute_units=units,
        tier_sizes=tuple(tier_sizes),
        matmul=matmul,
        streaming=streaming,
        attention=MappingProxyType(attention),
        fused_attention=AttentionGenerations(
            generations=sustained.attention_generations,
            long={name: (peak * fractions.forward, peak * fractions.backward) for name, fractions in sustained.long_attention.items()},
        ),
        grouped_matmul=_grouped_rates(calibration, matmul_model, dtype, peak * clock, memory_bandwidth, units, slowdown("matmul")),
        links=link_rates(cluster, calibration),
        memory=ChipMemory(
            bandwidth=memory_bandwidth,
            capacity=memory_capacity,
            usable=memory_capacity * chip.memory.usable_fraction,
            context_bytes=calibration.memory.context_bytes,
            communicator_bytes=tuple(communicator_bytes),
            allocator_factor=calibration.memory.allocator_factor,
        ),
        host=HostRates(
            launch_time=calibration.host.launch_time * sharing,
            times=MappingProxyType({name: time * sharing for name, time in calibration.host.host_times.items()}),
            is_chip=chip.units.unit_kind == "core",
            bandwidth=chip.host_bandwidth,
            memory_bandwidth=HOST_MEMORY_BANDWIDTH / max(min(cluster.num_chips, chip.node.chips_per_node), 1),
        ),
        contention=calibration.contention,
        basis=Basis(calibration=calibration.name, parts=MappingProxyType(rests_on), errors=calibration.fit.errors),
        serving=_serving_rates(calibration, chip, _decode_rates(calibration, memory_bandwidth, units, slowdown("attention")), widened),
        convolution=convolution,
    )


def is_machine_of(cluster: Cluster, num_chips: int, machine: Machine) -> bool:
    """Return whether the machine of a cluster is also that of `num_chips` of its chips.

    Processes of a CPU contend for its memory, a torus has a slice for each number, and chips of one host share the bandwidth of its memory.
    """
    host = cluster.chip.node.chips_per_node
    is_contended = machine.host.is_chip or machine.contention.get("cores", 0.0) > 0
    return min(cluster.num_chips, host) == min(num_chips, host) and not is_contended and not any(tier.torus_shape for tier in cluster.tiers)


def _serving_rates(
    calibration: Calibration, chip: Chip, decode_attention: Mapping[str, DecodeAttentionRates], widened: MatmulRates
) -> ServingRates:
    sustained = calibration.sustained
    rates = {
        dtype: (calibration.peaks.get(f"flop_rate.{dtype}", 0.0) or peak_rate) * sustained.clock(dtype)
        for dtype, peak_rate in chip.peak_flop_rate.items()
    }
    base_rate = next(rates[dtype] for dtype in (Dtype.BF16, Dtype.FP16, *rates) if dtype in rates)
    return ServingRates(
        kernels=calibration.kernels.serving.with_typical(),
        decode_attention=decode_attention,
        relative_rate=MappingProxyType({dtype: rate / base_rate for dtype, rate in rates.items()}),
        exposed_floor=sustained.exposed_floor_fraction,
        peak_flop_rate=base_rate / sustained.sustained_clock_fraction * sustained.attention_clock_fraction,
        widened=widened,
    )


def _grouped_rates(
    calibration: Calibration, plain: MatmulModel, dtype: Dtype, flop_rate: float, memory_bandwidth: float, units: float, factor: float
) -> GroupedMatmulRates:
    """Return rates of grouped products by the nearest dtype's model; without a model, those of plain products with two floors.

    flop_rate  peak at the sustained clock    factor  slow-down by contention
    """
    models = calibration.kernels.grouped_matmul
    unmeasured = GroupedMatmulModel(floor_time=2.0 * plain.floor_time)
    model = next((models[near] for near in (dtype, *_NEAREST_DTYPE.get(dtype, ())) if near in models), unmeasured)
    products = replace(
        _with_tile(plain, GROUPED_TILE),
        peak_fraction=plain.peak_fraction * model.rate_fraction,
        memory_fraction=plain.memory_fraction * model.memory_fraction,
    )
    return GroupedMatmulRates(
        matmul=_matmul_rates(products, flop_rate, memory_bandwidth, units, 0.0, factor),
        row_bandwidth=memory_bandwidth * model.row_fraction / factor,
        expert_time=model.expert_time * factor,
        floor_time=model.floor_time * calibration.sustained.exposed_floor_fraction * factor,
    )


def _decode_rates(calibration: Calibration, memory_bandwidth: float, units: float, factor: float) -> Mapping[str, DecodeAttentionRates]:
    models = calibration.kernels.decode_attention or {"flash": DecodeAttentionModel(floor_time=_UNMEASURED_DECODE_FLOOR)}
    return MappingProxyType(
        {
            name: DecodeAttentionRates(
                bandwidth=memory_bandwidth * model.memory_fraction / factor,
                floor_time=model.floor_time * calibration.sustained.exposed_floor_fraction * factor,
                ramp_time=model.ramp_time * factor,
                inverse_ramp_bytes=1.0 / model.ramp_bytes,
                unit_time=model.wave_time / units * factor,
            )
            for name, model in models.items()
        }
    )


def contention_factor(contention: Mapping[str, float], part: str, num_processes: int) -> float:
    """Return the factor by which `part` is slower if `num_processes` ranks of one machine all compute. [-]

    contention["cores"] processes have a core each and share only memory and caches. Together they take contention[part] times as long as
    one alone, fewer processes proportionally less. More processes than cores take turns. 1 on a machine whose ranks are separate chips.
    """
    cores = contention.get("cores", 0.0)
    if cores <= 0:
        return 1.0
    busy = (min(float(num_processes), cores) - 1.0) / max(cores - 1.0, 1.0)
    return (1.0 + (contention.get(part, 1.0) - 1.0) * busy) * max(num_processes / cores, 1.0)


def _label(calibration: Calibration, chip: Chip, part: str, is_there: object) -> str:
    if calibration.provenance is Provenance.SPEC_SHEET or not is_there:
        return str(Provenance.SPEC_SHEET)
    if calibration.provenance is not Provenance.CALIBRATED or chip.name not in calibration.chips:
        return f"{Provenance.PRIOR}: {calibration.name}"
    return f"{Provenance.PARTIAL if part in calibration.borrowed else Provenance.CALIBRATED}: {calibration.name}"


def _nearest_matmul(models: Mapping[Dtype, MatmulModel], dtype: Dtype) -> tuple[MatmulModel, bool]:
    """Return the model of `dtype` or of the nearest dtype, and whether it was measured for it (fp16 and bf16 run on the same units)."""
    if dtype in models:
        return models[dtype], True
    for near in _NEAREST_DTYPE.get(dtype, ()):
        if near in models:
            return models[near], {near, dtype} == {Dtype.BF16, Dtype.FP16}
    raise InputError(
        f"dtype={dtype}: the calibration has no matmul model near it; it has {', '.join(models)}; measure one or choose another"
    )


def _with_tile(model: MatmulModel, tile: tuple[float, float, float]) -> MatmulModel:
    return model if model.tiles == NO_TILES else replace(model, tiles=(*model.tiles, tile))


def _matmul_rates(
    model: MatmulModel, flop_rate: float, memory_bandwidth: float, units: float, floor_time: float, factor: float = 1.0
) -> MatmulRates:
    """Return the rates of a model. factor: slow-down by contention."""
    rows, columns, exponent = np.array(model.tiles, dtype=np.float64).T
    tile_columns = np.stack([1.0 / rows, 1.0 / columns, rows * columns * (1.0 + exponent * model.small_tile_penalty)])
    return MatmulRates(
        flop_rate=flop_rate * model.peak_fraction / factor,
        depth_offset=model.depth_offset,
        wave_softness=model.wave_softness,
        compute_units=units if model.tiles != NO_TILES else 1.0,  # without tiles there are no waves
        bandwidth=memory_bandwidth * model.memory_fraction / factor,
        floor_time=floor_time * factor,
        sharpness=model.sharpness,
        least_waves=model.least_waves,
        inverse_least_waves=1.0 / model.least_waves if model.least_waves > 0 else NEVER,
        inverse_split_depth=1.0 / model.split_depth if model.split_depth > 0 else 0.0,
        few_rows=model.few_rows,
        fills_units=model.least_waves == 0 and model.split_depth == 0,
        tiles=tuple(map(tuple, tile_columns.T.tolist())),
        tile_columns=tile_columns,
    )


def _streaming_rates(
    models: Mapping[KernelClass, StreamingModel], memory_bandwidth: Any, exposed_floor: float, factor: float
) -> StreamingRates:
    """Return the rates of kernel classes. factor: slow-down by contention, which leaves capacities."""
    columns, backward = np.shape(memory_bandwidth), np.ones(len(KernelClass))
    table = np.zeros((3, len(KernelClass), *columns))
    num_caches = max(len(model.caches) for model in models.values())
    caches = np.zeros((num_caches, 2, len(KernelClass), *columns))
    if KernelClass.DEFAULT not in models:
        raise InputError("streaming: the calibration has no class 'default'; add it")
    for code, kernel in enumerate(KernelClass):
        model = models.get(kernel) or models.get(_NEAREST_KERNEL.get(kernel, kernel)) or models[KernelClass.DEFAULT]
        inverse = [1.0 / (fraction * memory_bandwidth) for _, fraction in model.caches] + [
            1.0 / (model.bandwidth_fraction * memory_bandwidth)
        ]
        backward[code] = model.backward_factor
        table[0, code], table[1, code], table[2, code] = model.floor_time * exposed_floor, inverse[0], model.element_time
        for level, (capacity, _) in enumerate(model.caches):
            caches[level, 0, code], caches[level, 1, code] = 1.0 / capacity, (inverse[level + 1] - inverse[level]) * factor
    return StreamingRates(table=table * factor, caches=tuple(caches), backward=backward, has_backward=bool(np.any(backward != 1.0)))
