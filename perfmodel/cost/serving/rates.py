"""Serving kernels resolved for one machine: floats in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import SCALE_UP
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.serving_kernels import (
    ONE_SHOT,
    TWO_SHOT,
    TYPICAL,
    CachedAttentionModel,
    GroupedWeightModel,
    SmallAllReduceModel,
    WeightProductModel,
)

if TYPE_CHECKING:
    from perfmodel.cost.machine import DecodeAttentionRates, MatmulRates
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceRates:
    """`SmallAllReduceModel`s in SI units: (base [s], each peer [s], [s/byte]) of both kernels.

    most_ranks   chips of the innermost domain, beyond which peer memory cannot be read; 1 if it cannot be read at all
    mesh         links to distinct peers that together make the bandwidth (1 on a switch)
    """

    one_shot: tuple[float, float, float]
    two_shot: tuple[float, float, float]
    most_ranks: float
    mesh: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingRates:
    """`ServingKernels` in SI units.

    plain             unquantized products
    grouped           the same with the small tile of grouped kernels
    decode_attention  by kernel: of a decode step
    relative_rate     by compute dtype, the chip's FLOP rate at its clock over that of 16 bits; a dtype without units is missing
    memory_bandwidth  of the data sheet     [byte/s]
    exposed_floor     exposed share of a kernel's floor
    peak_flop_rate    in 16 bits, at the clock of attention     [FLOP/s]
    """

    all_reduce: AllReduceRates
    plain: MatmulRates
    grouped: MatmulRates
    decode_attention: Mapping[str, DecodeAttentionRates]
    relative_rate: Mapping[Dtype, float]
    memory_bandwidth: float
    exposed_floor: float
    peak_flop_rate: float
    compute_units: float
    weight_product: Mapping[str, WeightProductModel]
    grouped_weight: Mapping[str, GroupedWeightModel]
    cached_attention: Mapping[str, CachedAttentionModel]

    def product_rates(self, name: str, dtype: Dtype) -> MatmulRates:
        """Return the rates of products with weights in format `name`, computed in `dtype` (in 16 bits if the chip has no units for it)."""
        model, plain = self.weight_product[name], self.plain
        return replace(
            plain,
            flop_rate=plain.flop_rate * self.relative_rate.get(dtype, 1.0) * model.rate_fraction,
            bandwidth=plain.bandwidth * model.memory_fraction,
            depth_offset=plain.depth_offset * model.depth_factor,
            least_waves=plain.least_waves * model.waves_factor,
            inverse_least_waves=plain.inverse_least_waves / model.waves_factor,
            inverse_split_depth=plain.inverse_split_depth / model.split_factor,
            sharpness=model.sharpness or plain.sharpness,
        )

    def grouped_rates(self, model: GroupedWeightModel, dtype: Dtype) -> MatmulRates:
        """Return the rates of the experts' products of a layer by one kernel, as `product_rates`."""
        grouped = self.grouped
        return replace(
            grouped,
            flop_rate=grouped.flop_rate * self.relative_rate.get(dtype, 1.0) * model.rate_fraction,
            bandwidth=grouped.bandwidth * model.memory_fraction,
            depth_offset=grouped.depth_offset * model.depth_factor,
            sharpness=model.sharpness or grouped.sharpness,
        )


def serving_rates(
    cluster: Cluster,
    calibration: Calibration,
    *,
    plain: MatmulRates,
    grouped: MatmulRates,
    decode_attention: Mapping[str, DecodeAttentionRates],
    rates: Mapping[Dtype, float],
    memory_bandwidth: float,
) -> ServingRates:
    """Return the rates of measured kernels, and of typical ones where there is no measurement.

    rates  peak FLOP rates at their clocks, by dtype
    """
    base_rate = next(rates[dtype] for dtype in (Dtype.BF16, Dtype.FP16, *rates) if dtype in rates)
    measured, sustained = calibration.kernels.serving, calibration.sustained
    return ServingRates(
        all_reduce=_all_reduce_rates(cluster, calibration),
        plain=plain,
        grouped=grouped,
        decode_attention=decode_attention,
        relative_rate=MappingProxyType({dtype: rate / base_rate for dtype, rate in rates.items()}),
        memory_bandwidth=memory_bandwidth,
        exposed_floor=sustained.exposed_floor_fraction,
        peak_flop_rate=base_rate / sustained.sustained_clock_fraction * sustained.attention_clock_fraction,
        compute_units=float(max(cluster.chip.units.compute_units, 1)),
        weight_product={**TYPICAL.weight_product, **measured.weight_product},
        grouped_weight={**TYPICAL.grouped_weight, **measured.grouped_weight},
        cached_attention={**TYPICAL.cached_attention, **measured.cached_attention},
    )


def _all_reduce_rates(cluster: Cluster, calibration: Calibration) -> AllReduceRates:
    tier = cluster.tiers[0]
    bandwidth = calibration.peaks.get(f"{SCALE_UP}_bandwidth", tier.link.bandwidth)
    is_linked = tier.peer_to_peer and tier.topology in (Topology.SWITCH, Topology.FULL_MESH) and not cluster.is_scale_out(tier)
    models: Mapping[str, SmallAllReduceModel] = {**TYPICAL.small_all_reduce, **calibration.kernels.serving.small_all_reduce}

    def rates(kernel: str) -> tuple[float, float, float]:
        model = models[kernel]
        return model.base_time, model.peer_time, 1.0 / (bandwidth * model.bandwidth_fraction)

    return AllReduceRates(
        one_shot=rates(ONE_SHOT),
        two_shot=rates(TWO_SHOT),
        most_ranks=float(tier.size) if is_linked else 1.0,
        mesh=tier.link.bandwidth / tier.link.pair_bandwidth if tier.topology is Topology.FULL_MESH else 1.0,
    )
