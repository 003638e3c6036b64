"""The kernels of serving resolved for one machine: floats in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfmodel.hardware.calibration import SCALE_UP
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.serving_kernels import ONE_SHOT, TWO_SHOT, TYPICAL, ServingKernels, SmallAllReduceModel

if TYPE_CHECKING:
    from perfmodel.hardware.calibration import Calibration
    from perfmodel.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceRates:
    """`SmallAllReduceModel`s in SI units: (base [s], each peer [s], [s/byte]) of both kernels.

    most_ranks   chips of the innermost domain: beyond it no peer's memory can be read; 1 where it cannot be read at all
    mesh         links to distinct peers that together make the bandwidth (1 on a switch)
    """

    one_shot: tuple[float, float, float]
    two_shot: tuple[float, float, float]
    most_ranks: float
    mesh: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRates:
    """`ServingKernels` in SI units."""

    all_reduce: AllReduceRates


def serving_rates(cluster: Cluster, calibration: Calibration) -> ServingRates:
    """Measured kernels where there are any, typical ones else."""
    return ServingRates(all_reduce=_all_reduce_rates(cluster, calibration, calibration.serving))


def _all_reduce_rates(cluster: Cluster, calibration: Calibration, kernels: ServingKernels) -> AllReduceRates:
    tier = cluster.tiers[0]
    bandwidth = calibration.peaks.get(f"{SCALE_UP}_bandwidth", tier.link.bandwidth)
    is_linked = tier.peer_to_peer and tier.topology in (Topology.SWITCH, Topology.FULL_MESH) and not cluster.is_scale_out(tier)
    models: Mapping[str, SmallAllReduceModel] = {**TYPICAL.small_all_reduce, **kernels.small_all_reduce}

    def rates(kernel: str) -> tuple[float, float, float]:
        model = models[kernel]
        return model.base_time, model.peer_time, 1.0 / (bandwidth * model.bandwidth_fraction)

    return AllReduceRates(
        one_shot=rates(ONE_SHOT),
        two_shot=rates(TWO_SHOT),
        most_ranks=float(tier.size) if is_linked else 1.0,
        mesh=tier.link.bandwidth / tier.link.pair_bandwidth if tier.topology is Topology.FULL_MESH else 1.0,
    )
