"""Errors of the fits on shapes that they did not see: whole groups of shapes are left out, never single points of a group.

Groups: the weight (n, k) of a matrix multiply, at all its m; the heads (heads, kv heads, head dim) of an attention, at all its batches and
lengths; the decade of the message of a collective, at all numbers of ranks.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibrate.fits import (
    NUM_FOLDS,
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
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.calibration import GPU_TILES
from perfmodel.hardware.cluster import Cluster

_Table = TypeVar("_Table")
_Model = TypeVar("_Model")

DECODE_ROWS = 128
"""Matrix multiplies of fewer rows are those of decoding."""

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


def unseen_errors(
    groups: NDArray[Any],
    time: Array,
    rows: Callable[[Indices], _Table],
    *,
    fit: Callable[[_Table], _Model],
    predict: Callable[[_Model, _Table], Array],
    num_folds: int = NUM_FOLDS,
) -> Array:
    """Of every point, by a fit to a sample of the points of other groups. `rows`: the table at some indices. [-]"""

    def refit(chosen: Indices) -> Callable[[Indices], Array]:
        model = fit(rows(chosen[sample(len(chosen))]))
        return lambda held_out: predict(model, rows(held_out))

    return held_out_errors(groups, time, refit, num_folds=num_folds)


def matmul_errors(table: MatmulTable, cluster: Cluster, dtype: Dtype, *, tiles: Tiles = GPU_TILES) -> Array:
    """Of every shape, by a fit that saw its (n, k) at no m. [-]"""
    return unseen_errors(
        matmul_groups(table),
        table.time,
        table.rows,
        fit=lambda seen: fit_matmul(seen, cluster, dtype, tiles=tiles),
        predict=lambda model, unseen: predict_matmul(model, unseen, cluster, dtype),
    )


def attention_errors(table: AttentionTable, cluster: Cluster, *, head_dim_offset: float | None = None) -> Array:
    """Of every shape, by a fit that saw its heads at no batch and no length. [-]"""
    return unseen_errors(
        attention_groups(table),
        table.time,
        table.rows,
        fit=lambda seen: fit_attention(seen, cluster, Dtype.BF16, backward_rate=1.0, head_dim_offset=head_dim_offset),
        predict=lambda model, unseen: predict_attention(model, unseen, cluster, Dtype.BF16),
    )


def collective_errors(table: CollectiveTable, kind: CollectiveKind, cluster: Cluster, *, reduces_in_switch: bool = False) -> Array:
    """Of every message, by a fit that saw none of its decade of sizes: each decade is left out by itself. [-]"""
    decades = size_decades(table)
    return unseen_errors(
        decades,
        table.time,
        table.rows,
        fit=lambda seen: fit_collective(seen, kind, cluster, reduces_in_switch=reduces_in_switch),
        predict=lambda model, unseen: predict_collective(model, kind, unseen, cluster),
        num_folds=len(np.unique(decades)),
    )
