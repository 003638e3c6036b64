"""A cluster and a calibration resolved for one dtype: every number that the formulas of `cost/` need, as floats and small arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.link_latency import stated_latency_difference, with_latency
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.foundation.errors import InputError
from perfmodel.hardware.calibration import (
    GROUPED_TILE,
    NO_TILES,
    RAMP_BYTES,
    SCALE_OUT,
    SCALE_UP,
    SPEC_SHEET,
    AttentionModel,
    Calibration,
    CollectiveModel,
    ConvolutionModel,
    DecodeAttentionModel,
    GroupedMatmulModel,
    KernelClass,
    MatmulModel,
    Provenance,
    StreamingModel,
)
from perfmodel.hardware.fabric import STAGED_FRACTION, Topology

if TYPE_CHECKING:
    from perfmodel.hardware.chip import Chip
    from perfmodel.hardware.cluster import Cluster
    from perfmodel.hardware.fabric import NetworkTier

Array = NDArray[np.float64]

MEBIBYTE = 2.0**20
"""Unit of the host times that are counted by bytes, such as `gather_mebibyte`."""

NEVER = 1e30
"""[s] Latency of an algorithm that the library does not have: never the cheapest, and still 0 when multiplied by no hops."""

DEFAULT_LINK_FRACTION = 0.8
"""Bandwidth that a collective reaches of a link nobody measured: NCCL on NVLink and InfiniBand, large messages, typically .75-.9."""

_UNMEASURED_DECODE_FLOOR = 11e-6
"""[s] of a decode attention that nobody measured: fits to aiconfigurator's tables of H100, H200 and B200 (A100: 18 us)."""

# Where a dtype has no model of its own: the dtype whose fractions of peak are nearest, in order.
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

# Where a class of kernels was not measured: another one of its cost, before the default.
_NEAREST_KERNEL: Mapping[KernelClass, KernelClass] = MappingProxyType(
    {KernelClass.GELU_TANH: KernelClass.GELU, KernelClass.SILU: KernelClass.GELU, KernelClass.RMSNORM: KernelClass.LAYERNORM}
)

# Where a collective was not measured on a tier: the one that is nearest.
_NEAREST_COLLECTIVE: Mapping[CollectiveKind, tuple[CollectiveKind, ...]] = MappingProxyType(
    {
        CollectiveKind.ALL_GATHER: (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE),
        CollectiveKind.REDUCE_SCATTER: (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE),
        CollectiveKind.ALL_REDUCE: (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER),
        CollectiveKind.ALL_TO_ALL: (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER),
        CollectiveKind.SEND_RECV: (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL),
    }
)

RING_PASSES: Mapping[CollectiveKind, float] = MappingProxyType(
    {
        CollectiveKind.ALL_REDUCE: 2.0,
        CollectiveKind.REDUCE_SCATTER: 1.0,
        CollectiveKind.ALL_GATHER: 1.0,
        CollectiveKind.ALL_TO_ALL: 1.0,
        CollectiveKind.SEND_RECV: 2.0,
    }
)
"""Wire bytes of a rank over V (n - 1) / n; a send has n = 2 ranks and moves all of V."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatmulRates:
    """`MatmulModel` in SI units. tiles: one row (1 / rows, 1 / columns, output elements x penalty) for each tile.

    fills_units: a product is no slower for having fewer tiles than there are units, but for the last wave
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
    fills_units: bool
    tiles: tuple[tuple[float, float, float], ...]
    tile_columns: tuple[Array, Array, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionRates:
    """`ConvolutionModel` in SI units."""

    flop_rate: float
    depth_offset: float
    bandwidth: float
    floor_time: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamingRates:
    """Tables by kernel code. table: floor [s], [s/byte] innermost, [s/element]; caches: for each, (1 / capacity, extra [s/byte] beyond).

    backward    factor of backward kernels; has_backward: some are not 1
    """

    table: Array
    caches: tuple[Array, ...]
    backward: Array
    has_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """`AttentionModel` in SI units."""

    model: AttentionModel
    flop_rate: float
    compute_units: float
    bandwidth: float
    floor_time: float


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
class LinkRates:
    """Tables by parameter, tier and collective code; the rows of `table` are named by `LINK_ROWS`.

    mesh         for each tier, links to distinct peers that together make the bandwidth (1 on a switch)
    torus        for each tier, (slow-down of rings, of all-to-alls) by number of members; empty arrays where it is no torus
    has_one_shot, has_in_switch, has_ramp   some entry has a one-shot algorithm, a switch that reduces, a ramp
    stepped      tiers with steps between protocols
    """

    table: Array
    mesh: tuple[float, ...]
    torus: tuple[tuple[Array, Array], ...]
    has_one_shot: bool
    has_in_switch: bool
    has_ramp: bool
    stepped: tuple[int, ...]


LINK_ROWS = (
    "base",
    "hop",
    "tree",
    "inverse_bandwidth",
    "ramp",
    "exponent",
    "nested",
    "ring",
    "pairwise",
    "one_shot",
    "inner_hop",
    "in_switch",
    "own",
    "step",
    "step_bytes_squared",
    "bulk",
    "bulk_bytes_squared",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """What a cost needs to know of the hardware and its software, for one compute dtype. Made by `resolve_machine`.

    rests_on: for matmul, streaming, attention and the kinds of tier that are there (scale_up, scale_out): `spec sheet`, `prior: NAME` or
        `calibrated: NAME`.
    convolution: None where a convolution takes as long as a matrix multiply of its size.
    grouped_matmul, decode_attention: what the fused experts of a layer and a decoding step reach; no cost of a training step uses them.
    errors: held-out median errors of the calibration, by part.
    low: the same for products in fewer bits, of a job with a recipe for them.
    """

    cluster: str
    chip: str
    calibration: str
    dtype: Dtype
    peak_flop_rate: float
    memory_bandwidth: float
    memory_capacity: float
    memory_usable: float
    compute_units: float
    tier_sizes: tuple[int, ...]
    matmul: MatmulRates
    streaming: StreamingRates
    attention: Mapping[str, AttentionRates]
    grouped_matmul: GroupedMatmulRates
    decode_attention: Mapping[str, DecodeAttentionRates]
    links: LinkRates
    sustained_clock_fraction: float
    attention_generations: Mapping[str, float]
    launch_time: float
    host_times: Mapping[str, float]
    context_bytes: float
    allocator_factor: float
    contention: Mapping[str, float]
    rests_on: Mapping[str, str]
    convolution: ConvolutionRates | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    host_is_chip: bool = False
    low: Machine | None = None


def resolve_machine(cluster: Cluster, calibration: Calibration = SPEC_SHEET, *, dtype: Dtype = Dtype.BF16) -> Machine:
    """The machine that `cluster` is with what `calibration` says of it, computing in `dtype`."""
    chip = cluster.chip
    peak = calibration.peaks.get(f"flop_rate.{dtype}", 0.0) or chip.flop_rate(dtype)
    memory_bandwidth = calibration.peaks.get("memory_bandwidth", chip.memory.bandwidth)
    memory_capacity = calibration.peaks.get("memory_capacity", chip.memory.capacity)
    units = float(max(chip.compute_units, 1))
    rests_on = {}

    clock = calibration.clock_fractions.get(dtype, calibration.sustained_clock_fraction)

    def label(part: str, is_there: object) -> str:
        return _label(calibration, chip, part) if is_there else str(Provenance.SPEC_SHEET)

    def floor(time: float) -> float:
        return time * calibration.exposed_floor_fraction

    rests_on["matmul"] = label("matmul", calibration.matmul)
    matmul_model, is_own = _nearest_matmul(calibration.matmul or SPEC_SHEET.matmul, dtype)
    if not is_own and calibration.provenance is Provenance.CALIBRATED and calibration.matmul:
        rests_on["matmul"] = f"{Provenance.PRIOR}: {calibration.name}"
    matmul = _matmul_rates(matmul_model, peak * clock, memory_bandwidth, units, floor(matmul_model.floor_time))

    streaming_models = calibration.streaming or SPEC_SHEET.streaming
    rests_on["streaming"] = label("streaming", calibration.streaming)
    streaming = _streaming_rates(streaming_models, memory_bandwidth, calibration.exposed_floor_fraction)

    attention_models = calibration.attention or SPEC_SHEET.attention
    rests_on["attention"] = label("attention", calibration.attention)
    attention = {
        name: AttentionRates(
            model=model,
            flop_rate=peak * calibration.attention_clock_fraction * model.peak_fraction,
            compute_units=units,
            bandwidth=memory_bandwidth * model.memory_fraction,
            floor_time=floor(model.floor_time),
        )
        for name, model in _of_dtype(attention_models, dtype).items()
    }

    def slowdown(part: str) -> float:
        return contention_factor(calibration.contention, part, cluster.num_chips)

    sharing = slowdown("host")
    for tier in cluster.tiers:
        rests_on[tier_kind(cluster, tier)] = label(tier_kind(cluster, tier), _tier_models(cluster, tier, calibration))
    return Machine(
        cluster=cluster.name,
        chip=chip.name,
        calibration=calibration.name,
        dtype=dtype,
        peak_flop_rate=peak,
        memory_bandwidth=memory_bandwidth,
        memory_capacity=memory_capacity,
        memory_usable=memory_capacity * chip.memory.usable_fraction,
        compute_units=units,
        tier_sizes=tuple(tier.size for tier in cluster.tiers),
        matmul=_slower_matmul(matmul, slowdown("matmul")),
        streaming=_slower_streaming(streaming, slowdown("streaming")),
        attention=MappingProxyType({name: _slower_attention(rates, slowdown("attention")) for name, rates in attention.items()}),
        grouped_matmul=_grouped_rates(
            calibration,
            matmul_model,
            dtype,
            peak * clock,
            memory_bandwidth,
            units,
            slowdown("matmul"),
        ),
        decode_attention=_decode_rates(calibration, memory_bandwidth, units, slowdown("attention")),
        links=_link_rates(cluster, calibration),
        sustained_clock_fraction=clock,
        attention_generations=calibration.attention_generations,
        launch_time=calibration.launch_time * sharing,
        host_is_chip=chip.unit_kind == "core",
        host_times=MappingProxyType({name: time * sharing for name, time in calibration.host_times.items()}),
        context_bytes=calibration.context_bytes,
        allocator_factor=calibration.allocator_factor,
        contention=calibration.contention,
        rests_on=MappingProxyType(rests_on),
        convolution=_convolution_rates(calibration.convolution.get(dtype), peak, memory_bandwidth, calibration, slowdown("matmul")),
        errors=calibration.errors,
    )


def _convolution_rates(
    model: ConvolutionModel | None, peak: float, memory_bandwidth: float, calibration: Calibration, factor: float
) -> ConvolutionRates | None:
    if model is None:
        return None
    return ConvolutionRates(
        flop_rate=peak * calibration.sustained_clock_fraction * model.peak_fraction / factor,
        depth_offset=model.depth_offset,
        bandwidth=memory_bandwidth * model.memory_fraction / factor,
        floor_time=model.floor_time * calibration.exposed_floor_fraction * factor,
    )


def _grouped_rates(
    calibration: Calibration, plain: MatmulModel, dtype: Dtype, flop_rate: float, memory_bandwidth: float, units: float, factor: float
) -> GroupedMatmulRates:
    """Of the dtype's own model or of the nearest dtype's; without one, plain products and the floors of two.

    flop_rate  peak at the sustained clock    factor  slow-down by contention
    """
    models = calibration.grouped_matmul
    unmeasured = GroupedMatmulModel(floor_time=2.0 * plain.floor_time)
    model = next((models[near] for near in (dtype, *_NEAREST_DTYPE.get(dtype, ())) if near in models), unmeasured)
    products = replace(
        plain,
        peak_fraction=plain.peak_fraction * model.rate_fraction,
        memory_fraction=plain.memory_fraction * model.memory_fraction,
        tiles=plain.tiles if plain.tiles == NO_TILES else (*plain.tiles, GROUPED_TILE),
    )
    return GroupedMatmulRates(
        matmul=_slower_matmul(_matmul_rates(products, flop_rate, memory_bandwidth, units, 0.0), factor),
        row_bandwidth=memory_bandwidth * model.row_fraction / factor,
        expert_time=model.expert_time * factor,
        floor_time=model.floor_time * calibration.exposed_floor_fraction * factor,
    )


def _decode_rates(calibration: Calibration, memory_bandwidth: float, units: float, factor: float) -> Mapping[str, DecodeAttentionRates]:
    models = calibration.decode_attention or {"flash": DecodeAttentionModel(floor_time=_UNMEASURED_DECODE_FLOOR)}
    return MappingProxyType(
        {
            name: DecodeAttentionRates(
                bandwidth=memory_bandwidth * model.memory_fraction / factor,
                floor_time=model.floor_time * calibration.exposed_floor_fraction * factor,
                ramp_time=model.ramp_time * factor,
                inverse_ramp_bytes=1.0 / model.ramp_bytes,
                unit_time=model.wave_time / units * factor,
            )
            for name, model in models.items()
        }
    )


def contention_factor(contention: Mapping[str, float], part: str, num_processes: int) -> float:
    """How much longer `part` takes where `num_processes` ranks of one machine all compute. [-]

    contention["cores"] processes have a core each and share memory and caches only: together they take contention[part] times as long
    as one alone, fewer proportionally less. More than that take turns. 1 on a machine whose ranks are chips of their own.
    """
    cores = contention.get("cores", 0.0)
    if cores <= 0:
        return 1.0
    busy = (min(float(num_processes), cores) - 1.0) / max(cores - 1.0, 1.0)
    return (1.0 + (contention.get(part, 1.0) - 1.0) * busy) * max(num_processes / cores, 1.0)


def _slower_matmul(rates: MatmulRates, factor: float) -> MatmulRates:
    if factor == 1.0:
        return rates
    return replace(rates, flop_rate=rates.flop_rate / factor, bandwidth=rates.bandwidth / factor, floor_time=rates.floor_time * factor)


def _slower_streaming(rates: StreamingRates, factor: float) -> StreamingRates:
    if factor == 1.0:
        return rates
    caches = tuple(cache * np.array([[1.0], [factor]]) for cache in rates.caches)  # capacities stay
    return replace(rates, table=rates.table * factor, caches=caches)


def _slower_attention(rates: AttentionRates, factor: float) -> AttentionRates:
    if factor == 1.0:
        return rates
    return replace(rates, flop_rate=rates.flop_rate / factor, bandwidth=rates.bandwidth / factor, floor_time=rates.floor_time * factor)


def _label(calibration: Calibration, chip: Chip, part: str) -> str:
    if calibration.provenance is Provenance.SPEC_SHEET:
        return str(Provenance.SPEC_SHEET)
    is_measured = calibration.provenance is Provenance.CALIBRATED and chip.name in calibration.chips and part not in calibration.borrowed
    return f"{Provenance.CALIBRATED if is_measured else Provenance.PRIOR}: {calibration.name}"


def _nearest_matmul(models: Mapping[Dtype, MatmulModel], dtype: Dtype) -> tuple[MatmulModel, bool]:
    """The model of `dtype` or of the dtype nearest to it, and whether it is its own (fp16 and bf16 run on the same units)."""
    if dtype in models:
        return models[dtype], True
    for near in _NEAREST_DTYPE.get(dtype, ()):
        if near in models:
            return models[near], {near, dtype} == {Dtype.BF16, Dtype.FP16}
    raise InputError(
        f"dtype={dtype}: the calibration has no matmul model near it; it has {', '.join(models)}; measure one or choose another"
    )


def _of_dtype(models: Mapping[str, AttentionModel], dtype: Dtype) -> dict[str, AttentionModel]:
    """Kernels by their plain names: `flash.bf16` takes the place of `flash` in bf16."""
    plain = {name: model for name, model in models.items() if "." not in name}
    return plain | {name.removesuffix(f".{dtype}"): model for name, model in models.items() if name.endswith(f".{dtype}")}


def _matmul_rates(model: MatmulModel, flop_rate: float, memory_bandwidth: float, units: float, floor_time: float) -> MatmulRates:
    tiles = tuple(
        (1.0 / rows, 1.0 / columns, rows * columns * (1.0 + exponent * model.small_tile_penalty)) for rows, columns, exponent in model.tiles
    )
    columns = np.array(tiles).T
    return MatmulRates(
        flop_rate=flop_rate * model.peak_fraction,
        depth_offset=model.depth_offset,
        wave_softness=model.wave_softness,
        compute_units=units if model.tiles != NO_TILES else 1.0,  # without tiles there are no waves
        bandwidth=memory_bandwidth * model.memory_fraction,
        floor_time=floor_time,
        sharpness=model.sharpness,
        least_waves=model.least_waves,
        inverse_least_waves=1.0 / model.least_waves if model.least_waves > 0 else NEVER,
        inverse_split_depth=1.0 / model.split_depth if model.split_depth > 0 else 0.0,
        fills_units=model.least_waves == 0 and model.split_depth == 0,
        tiles=tiles,
        tile_columns=(columns[0], columns[1], columns[2]),
    )


def _streaming_rates(models: Mapping[KernelClass, StreamingModel], memory_bandwidth: float, exposed_floor: float) -> StreamingRates:
    table, backward = np.zeros((3, len(KernelClass))), np.ones(len(KernelClass))
    num_caches = max(len(model.caches) for model in models.values())
    caches = [np.zeros((2, len(KernelClass))) for _ in range(num_caches)]
    if KernelClass.DEFAULT not in models:
        raise InputError("streaming: the calibration has no class 'default'; add it")
    for code, kernel in enumerate(KernelClass):
        model = models.get(kernel) or models.get(_NEAREST_KERNEL.get(kernel, kernel)) or models[KernelClass.DEFAULT]
        inverse = [1.0 / (fraction * memory_bandwidth) for _, fraction in model.caches] + [
            1.0 / (model.bandwidth_fraction * memory_bandwidth)
        ]
        backward[code] = model.backward_factor
        table[:, code] = model.floor_time * exposed_floor, inverse[0], model.element_time
        for level, (capacity, _) in enumerate(model.caches):
            caches[level][:, code] = 1.0 / capacity, inverse[level + 1] - inverse[level]
    return StreamingRates(table=table, caches=tuple(caches), backward=backward, has_backward=bool(np.any(backward != 1.0)))


def tier_kind(cluster: Cluster, tier: NetworkTier) -> str:
    """The fabric between nodes is scale-out; every tier inside it is scale-up. A cluster may lack either."""
    return SCALE_OUT if cluster.is_scale_out(tier) else SCALE_UP


def _link_rates(cluster: Cluster, calibration: Calibration) -> LinkRates:
    table = np.zeros((len(LINK_ROWS), len(cluster.tiers), len(CollectiveKind)))
    mesh, torus = [], []
    domain = 1
    for index, tier in enumerate(cluster.tiers):
        models = _tier_models(cluster, tier, calibration)
        bandwidth = calibration.peaks.get(f"{tier_kind(cluster, tier)}_bandwidth", tier.link.bandwidth) / tier.oversubscription
        if not (models or tier.peer_to_peer):
            bandwidth *= STAGED_FRACTION
        for code, kind in enumerate(CollectiveKind):
            model, passes = _collective_model(models, kind, tier.link.latency, is_inside=tier_kind(cluster, tier) == SCALE_UP)
            is_pairwise = kind is CollectiveKind.ALL_TO_ALL
            is_nested = model.nested and not is_pairwise and kind is not CollectiveKind.SEND_RECV
            table[:, index, code] = (
                model.base_time,
                model.hop_time,
                model.tree_hop_time or NEVER,
                1.0 / (bandwidth * model.bandwidth_fraction),
                model.ramp_time / RAMP_BYTES**model.ramp_exponent,
                model.ramp_exponent,
                passes * is_nested,
                passes * (not is_nested and not is_pairwise),
                passes * is_pairwise,
                model.one_shot_time or NEVER,
                model.inner_hop_time,
                1.0 / (bandwidth * model.switch_fraction) if model.switch_fraction > 0 else NEVER,
                passes * model.own_share,
                model.step_share,
                model.step_bytes**2,
                model.bulk_time,
                model.bulk_bytes**2,
            )
        mesh.append(tier.link.bandwidth / tier.link.pair_bandwidth if tier.topology is Topology.FULL_MESH else 1.0)
        torus.append(_torus_slowdown(tier, max(min(cluster.num_chips, tier.size) // domain, 1)))
        domain = tier.size
    rows = dict(zip(LINK_ROWS, table, strict=True))
    return LinkRates(
        table=table,
        mesh=tuple(mesh),
        torus=tuple(torus),
        has_one_shot=bool((rows["one_shot"] < NEVER).any()),
        has_in_switch=bool((rows["in_switch"] < NEVER).any()),
        has_ramp=bool(rows["ramp"].any()),
        stepped=tuple(int(tier) for tier in np.flatnonzero((rows["own"] + rows["step"] + rows["bulk"]).any(axis=1))),
    )


def _tier_models(cluster: Cluster, tier: NetworkTier, calibration: Calibration) -> Mapping[CollectiveKind, CollectiveModel]:
    """The measured models that hold on `tier`: figures of a switch say nothing of a relative's mesh, torus or PCIe tree."""
    kind = tier_kind(cluster, tier)
    if kind == SCALE_UP and cluster.chip.name not in calibration.chips and tier.topology is not Topology.SWITCH:
        return {}
    return with_latency(calibration.collectives.get(kind, {}), stated_latency_difference(cluster, tier), RING_PASSES)


def _collective_model(
    models: Mapping[CollectiveKind, CollectiveModel], kind: CollectiveKind, latency: float, *, is_inside: bool
) -> tuple[CollectiveModel, float]:
    """The measured model of `kind`, else that of the collective nearest to it, else alpha-beta on the link; and its ring passes."""
    passes = RING_PASSES[kind]
    if kind in models:
        return models[kind], passes
    for near in _NEAREST_COLLECTIVE[kind]:
        if near in models:
            model = models[near]
            scale = 1.0 if kind is CollectiveKind.SEND_RECV else passes / RING_PASSES[near]
            return replace(model, hop_time=model.hop_time * scale, tree_hop_time=model.tree_hop_time * scale), passes
    # Thakur, Rabenseifner & Gropp 2005: a ring pass takes n - 1 hops, recursive halving or doubling log2 n; a send is one hop.
    is_exchange = kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV)
    hop_time = latency if is_exchange else passes * latency
    return (
        CollectiveModel(
            hop_time=hop_time,
            bandwidth_fraction=DEFAULT_LINK_FRACTION,
            tree_hop_time=0.0 if is_exchange else hop_time,
            one_shot_time=latency if kind is CollectiveKind.ALL_REDUCE and is_inside else 0.0,
            nested=True,
        ),
        passes,
    )


def _torus_slowdown(tier: NetworkTier, num_chips: int) -> tuple[Array, Array]:
    """Slow-down over the link's whole bandwidth by number of members, for rings and for all-to-alls; empty where no torus. [-]

    A group is taken to fill the dims of the job's slice one after the other. A chip has two links in each of D dims and `bandwidth`
    is all of them together. Rings run in all the dims that the group spans at once, both ways round; a dim that does not wrap has half
    the bandwidth, for what leaves at one end must come back through the same links. In an all-to-all over l chips of a dim, a link
    carries l/4 times what a chip sends, over two (l/2 without the wrap, in the middle), so its time grows with the longest dim.

    Source: Jouppi et al., ISCA 2023 (TPU v4); Google Cloud TPU documentation (a dim wraps when it is a multiple of 4, on v5e and
    v6e when it is 16).
    """
    if not tier.torus_shape:
        return np.empty(0), np.empty(0)
    shape = tier.slice_shape(num_chips)
    members = np.arange(np.prod(shape) + 1.0)
    left, share, longest = members.copy(), np.zeros_like(members), np.zeros_like(members)
    for length in shape:
        span = np.minimum(left, length)
        wraps = (span == length) & tier.wraps(length)
        share += np.where(span > 1, np.where(wraps, 1.0, 0.5), 0.0)
        longest = np.maximum(longest, np.where(span > 1, np.where(wraps, span / 4, span / 2), 0.0))
        left = np.ceil(left / length)
    ring = len(tier.torus_shape) / np.maximum(share, 0.5)
    pairwise = np.maximum(ring, len(tier.torus_shape) * longest * members / np.maximum(members - 1, 1))
    return ring, pairwise
