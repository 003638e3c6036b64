"""Fits of the parameters of GPU kernels (`perfmodel.hardware.calibration`) to tables of thousands of shapes, with the formulas used for
prediction: non-linear least squares on the logarithm of the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from perfmodel.calibrate.fits import Array, rounded
from perfmodel.cost.collectives import collective_time
from perfmodel.cost.compute import attention_time, matmul_time
from perfmodel.cost.machine import Machine, resolve_machine
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype, itemsize
from perfmodel.hardware.calibration import GPU_TILES, SCALE_UP, AttentionModel, Calibration, CollectiveModel, KernelModels, MatmulModel
from perfmodel.hardware.cluster import Cluster

Tiles = tuple[tuple[float, float, float], ...]

OUTLIER = 0.1
"""Relative error from which a point counts less than its square (soft L1): tables contain badly selected kernels."""

REDUCE_RAMP_EXPONENT = 0.7
"""Exponent of the ramp of an all-reduce, which also changes its algorithm (tree, ring, in the switch), not only its protocol."""

RING_STEP_BYTES, EXCHANGE_STEP_BYTES, BULK_BYTES = 2.0**12, 2.0**14.5, 2.0**20
"""Chunk sizes at which NCCL's latency steps up (rings, all-to-alls) and from which transfers are bandwidth-bound. They are similar on A100,
H100 and B200 with 2, 4 and 8 ranks, so they are not fitted for each."""

NO_SOFTNESS = 1e-3
"""Wave softness below which it is set to 0, which costs less to evaluate."""

_Table = TypeVar("_Table", bound=Any)


def chosen_rows(table: _Table, chosen: object) -> _Table:
    """Return the rows of a table that `chosen` indexes; its fields are columns of equal length."""
    return replace(table, **{column.name: getattr(table, column.name)[chosen] for column in fields(table)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatmulTable:
    """Measured matrix multiplies: columns of equal length; time [s]."""

    m: Array
    n: Array
    k: Array
    time: Array

    def rows(self, chosen: object) -> "MatmulTable":
        return chosen_rows(self, chosen)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionTable:
    """Measured causal fused attention, forward; time [s]."""

    batch: Array
    heads: Array
    kv_heads: Array
    length: Array
    head_dim: Array
    time: Array

    def rows(self, chosen: object) -> "AttentionTable":
        return chosen_rows(self, chosen)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveTable:
    """Measured collectives of one kind; ranks_per_node = ranks if all are in one node; time [s].

    link_scale  bandwidth of its links over those of the cluster that the table is fitted for  [-]
    """

    num_bytes: Array
    ranks: Array
    ranks_per_node: Array
    time: Array
    link_scale: Array | float = 1.0

    def rows(self, chosen: object) -> "CollectiveTable":
        return chosen_rows(replace(self, link_scale=self.link_scales), chosen)

    @property
    def link_scales(self) -> Array:
        """Link scale of every row."""
        return np.broadcast_to(self.link_scale, self.time.shape)


def bare_machine(cluster: Cluster, dtype: Dtype, **parts: Any) -> Machine:
    """Return the machine with only these kernels calibrated: no clock factor and fully exposed floors, as in a benchmark."""
    calibration = Calibration(name="fit", chips=(cluster.chip.name,), software="", source="", date="", kernels=KernelModels(**parts))
    return resolve_machine(cluster, calibration, dtype=dtype)


def fit_logarithm(
    predict: Callable[[Array], Array],
    time: Array,
    *,
    start: Sequence[float],
    lower: Sequence[float],
    upper: Sequence[float],
    weight: object = 1.0,
) -> Array:
    """Return the parameters within their bounds that minimise the error of the logarithm of the time."""
    from scipy.optimize import least_squares

    logarithm = np.log(time)
    scale = np.maximum(np.abs(np.array(start)), 0.05 * (np.array(upper) - np.array(lower)))
    result = least_squares(
        lambda parameters: (np.log(predict(parameters)) - logarithm) * weight,
        start,
        bounds=(lower, upper),
        x_scale=scale,
        loss="soft_l1",
        f_scale=OUTLIER,
        diff_step=1e-3,
    )
    return np.asarray(result.x)


LARGE_TIME = 1e-4
"""Time at peak rate of a large product. [s] In a fit it counts twice as much as a small one, larger ones up to three times, as they
dominate a step."""


def octave_weight(*columns: Array) -> Array:
    """Return weights that count each octave of the shapes once, at any density of measurements; mean 1."""
    octaves = np.stack([np.round(np.log2(column)) for column in columns])
    _, inverse, counts = np.unique(octaves, axis=1, return_inverse=True, return_counts=True)
    weight = 1.0 / np.sqrt(counts[inverse.ravel()])
    return np.asarray(weight / weight.mean())


def predict_matmul(model: MatmulModel, table: MatmulTable, cluster: Cluster, dtype: Dtype) -> Array:
    """Return the predicted times of a table of matrix multiplies. [s]"""
    machine = bare_machine(cluster, dtype, matmul={dtype: model})
    return np.asarray(matmul_time(batch=1.0, m=table.m, n=table.n, k=table.k, itemsize=itemsize(dtype), machine=machine))


def fit_matmul(table: MatmulTable, cluster: Cluster, dtype: Dtype, *, tiles: Tiles = GPU_TILES) -> MatmulModel:
    """Fit the model of a GPU's matrix multiplies, starting from the parameters of four chips and bounded around them."""
    size = 2 * table.m * table.n * table.k / (cluster.chip.flop_rate(dtype) * LARGE_TIME)
    weight = octave_weight(table.m, table.n, table.k) * (1.0 + 2.0 * size / (1.0 + size))

    def model(x: Array) -> MatmulModel:
        return MatmulModel(
            peak_fraction=rounded(x[0]),
            depth_offset=rounded(x[1]),
            wave_softness=rounded(x[2]) if x[2] > NO_SOFTNESS else 0.0,
            memory_fraction=rounded(x[3]),
            floor_time=rounded(x[4] * 1e-6),
            sharpness=rounded(x[5]),
            small_tile_penalty=rounded(x[6]),
            least_waves=rounded(x[7]),
            split_depth=rounded(np.exp(x[8])),
            tiles=tiles,
        )

    parameters = fit_logarithm(
        lambda x: predict_matmul(model(x), table, cluster, dtype),
        table.time,
        start=(0.8, 80, 0.2, 0.9, 3, 3, 0.1, 0.6, 8),
        lower=(0.3, 0, 0, 0.3, 0.1, 1, 0, 0.05, 4),
        upper=(1.2, 600, 1, 1.2, 20, 8, 1, 2, 11.5),
        weight=weight / weight.mean(),
    )
    return model(parameters)


def predict_attention(model: AttentionModel, table: AttentionTable, cluster: Cluster, dtype: Dtype) -> Array:
    """Return the predicted forward times of a table of causal attention. [s]"""
    machine = bare_machine(cluster, dtype, attention={"flash": model})
    time = attention_time(
        batch=table.batch,
        heads=table.heads,
        kv_heads=table.kv_heads,
        query_length=table.length,
        key_length=table.length,
        head_dim=table.head_dim,
        causal_fraction=0.5,
        itemsize=itemsize(dtype),
        machine=machine,
    )
    return np.asarray(time)


def fit_attention(
    table: AttentionTable, cluster: Cluster, dtype: Dtype, *, backward_rate: float, head_dim_offset: float | None = None
) -> AttentionModel:
    """Fit the forward model of a causal flash kernel.

    With a single head dim in the table, its offset cannot be separated from the peak: pass `head_dim_offset`.
    """

    def model(x: Array) -> AttentionModel:
        return AttentionModel(
            peak_fraction=rounded(x[0]),
            head_dim_offset=rounded(x[1]) if head_dim_offset is None else head_dim_offset,
            sequence_offset=rounded(x[2] * 1e4),
            floor_time=rounded(x[3] * 1e-6),
            wave_softness=rounded(x[4]),
            memory_fraction=rounded(x[5]),
            backward_rate=backward_rate,
        )

    parameters = fit_logarithm(
        lambda x: predict_attention(model(x), table, cluster, dtype),
        table.time,
        start=(0.6, 20, 3, 14, 0.3, 0.5),
        lower=(0.1, 0, 0, 1, 0, 0.05),
        upper=(0.9, 200, 40, 60, 1, 2),
    )
    return model(parameters)


def predict_collective(model: CollectiveModel, kind: CollectiveKind, table: CollectiveTable, cluster: Cluster) -> Array:
    """Return the predicted times of a table on the innermost tier alone. [s]"""
    machine = bare_machine(cluster, next(iter(cluster.chip.peak_flop_rate)), collectives={SCALE_UP: {kind: model}})
    inside = [table.ranks] * len(cluster.tiers)
    return np.asarray(collective_time(kind, table.num_bytes, group_size=table.ranks, inside=inside, machine=machine))


def fit_collective(table: CollectiveTable, kind: CollectiveKind, cluster: Cluster, *, reduces_in_switch: bool = False) -> CollectiveModel:
    """Fit the model of a collective inside a node; `reduces_in_switch`: the switch can add, so that all-reduce has a second bound."""
    step_bytes = EXCHANGE_STEP_BYTES if kind is CollectiveKind.ALL_TO_ALL else RING_STEP_BYTES

    def model(x: Array) -> CollectiveModel:
        return CollectiveModel(
            base_time=rounded(x[0] * 1e-6),
            hop_time=rounded(x[1] * 1e-6),
            bandwidth_fraction=rounded(x[2]),
            own_share=rounded(x[3]),
            step_share=rounded(x[4]),
            step_bytes=step_bytes,
            bulk_time=rounded(x[5] * 1e-6),
            bulk_bytes=BULK_BYTES,
            switch_fraction=rounded(x[6]) if reduces_in_switch else 0.0,
            ramp_time=rounded(x[7] * 1e-6) if kind is CollectiveKind.ALL_REDUCE else 0.0,
            ramp_exponent=REDUCE_RAMP_EXPONENT,
        )

    parameters = fit_logarithm(
        lambda x: predict_collective(model(x), kind, table, cluster),
        table.time,
        start=(8, 1, 0.8, 0.4, 0.3, 10, 0.6, 2),
        lower=(0.1, 0, 0.5, 0, 0, 0, 0.5, 0),
        upper=(60, 30, 1.0, 1.5, 3, 100, 1.0, 60),
        weight=np.sqrt(table.ranks / table.ranks.mean()),
    )
    return model(parameters)
