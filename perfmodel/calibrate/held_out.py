"""Errors of the fits on shapes that they did not see: whole groups of shapes are left out, never single points of a group.

Groups: the weight (n, k) of a matrix multiply, at all its m; the heads (heads, kv heads, head dim) of an attention, at all its batches and
lengths; the decade of the message of a collective, at all numbers of ranks.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.fits import (
    Array,
    AttentionTable,
    CollectiveTable,
    Indices,
    MatmulTable,
    Tiles,
    fit_attention,
    fit_collective,
    fit_matmul,
    held_out_errors,
    predict_attention,
    predict_collective,
    predict_matmul,
)
from perfmodel.collectives import CollectiveKind
from perfmodel.dtypes import Dtype
from perfmodel.hardware.calibration import GPU_TILES
from perfmodel.hardware.cluster import Cluster

FIT_POINTS = 3000
"""Points of a table that a fit looks at (drawn at random, seed 0); errors are on all of them."""


def sample(number: int) -> Indices:
    """The points that a fit to `number` of them looks at."""
    return np.sort(np.random.default_rng(0).permutation(number)[:FIT_POINTS])


def groups_of(*columns: Array) -> NDArray[Any]:
    """The same integer wherever all the columns agree."""
    _, group = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return np.asarray(group).ravel()


def matmul_groups(table: MatmulTable) -> NDArray[Any]:
    return groups_of(table.n, table.k)


def attention_groups(table: AttentionTable) -> NDArray[Any]:
    return groups_of(table.heads, table.kv_heads, table.head_dim)


def size_decades(table: CollectiveTable) -> NDArray[Any]:
    return np.floor(np.log10(table.num_bytes)).astype(int)


def matmul_errors(table: MatmulTable, cluster: Cluster, dtype: Dtype, *, tiles: Tiles = GPU_TILES) -> Array:
    """Of every shape, by a fit that saw its (n, k) at no m. [-]"""

    def refit(chosen: Indices) -> Any:
        model = fit_matmul(table.rows(chosen[sample(len(chosen))]), cluster, dtype, tiles=tiles)
        return lambda rows: predict_matmul(model, table.rows(rows), cluster, dtype)

    return held_out_errors(matmul_groups(table), table.time, refit)


def attention_errors(table: AttentionTable, cluster: Cluster) -> Array:
    """Of every shape, by a fit that saw its heads at no batch and no length. [-]"""

    def refit(chosen: Indices) -> Any:
        model = fit_attention(table.rows(chosen[sample(len(chosen))]), cluster, Dtype.BF16, backward_rate=1.0)
        return lambda rows: predict_attention(model, table.rows(rows), cluster, Dtype.BF16)

    return held_out_errors(attention_groups(table), table.time, refit)


def collective_errors(table: CollectiveTable, kind: CollectiveKind, cluster: Cluster, *, reduces_in_switch: bool = False) -> Array:
    """Of every message, by a fit that saw none of its decade of sizes: each decade is left out by itself. [-]"""
    decades = size_decades(table)

    def refit(chosen: Indices) -> Any:
        model = fit_collective(table.rows(chosen), kind, cluster, reduces_in_switch=reduces_in_switch)
        return lambda rows: predict_collective(model, kind, table.rows(rows), cluster)

    return held_out_errors(decades, table.time, refit, num_folds=len(np.unique(decades)))
